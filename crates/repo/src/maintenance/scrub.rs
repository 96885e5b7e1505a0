//! Reads packs from end to end: every byte is hashed against the pack's name, every frame opened and decoded,
//! every blob hashed against its id.

use std::collections::BTreeSet;
use std::fs::File;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};

use stillframe_page::encoding::Decoder;
use stillframe_page::hash::ContentHasher;

use crate::crypto::Keys;
use crate::error::RepoError;
use crate::format::file_hash::FileHash;
use crate::format::image_record::ImageId;
use crate::format::layout::FormatError;
use crate::images::external_reader::ExternalReader;
use crate::maintenance::problem::Problem;
use crate::pack::external_frame::ExternalPlace;
use crate::pack::open::decode_payload;
use crate::pack::open::open_pack;
use crate::pack::place::FrameInfo;
use crate::pack::{
    Directory, Frame, KIND_EXTERNAL, PREAMBLE_BYTES, PackCipher, TAIL_BYTES, decode_tail,
};
use crate::progress::{Phase, Progress};
use crate::repository::Repository;
use crate::store::local::{Area, LocalStore};
use crate::store::read_exact_at;

/// Number of packs read at once.
const THREADS: usize = 2;

/// An existing pack: its name, and its length in bytes.
pub(crate) struct PackFile {
    pub(crate) name: FileHash,
    pub(crate) bytes: u64,
}

impl Repository {
    /// Calls `visit` for each file in `packs/` with its name, and with `None` if it is gone or not named like a pack.
    pub(crate) fn visit_pack_files(
        &self,
        progress: &mut dyn FnMut(Progress),
        mut visit: impl FnMut(&str, Option<PackFile>) -> Result<(), RepoError>,
    ) -> Result<(), RepoError> {
        let names = self.store.names(Area::Packs)?;
        for (done, file) in (0..).zip(&names) {
            progress(Progress {
                phase: Phase::Packs,
                done,
                total: names.len() as u64,
            });
            let bytes = self.store.length(Area::Packs, file)?;
            let pack = FileHash::from_name(file)
                .zip(bytes)
                .map(|(name, bytes)| PackFile { name, bytes });
            visit(file, pack)?;
        }
        Ok(())
    }
}

/// Reads the given packs, and those blocks of the given images that they name. Returns their problems, and the number of bytes read.
pub(crate) fn scrub_packs(
    from: &Repository,
    packs: Vec<PackFile>,
    images: &BTreeSet<ImageId>,
    progress: &mut dyn FnMut(Progress),
) -> Result<(Vec<Problem>, u64), RepoError> {
    let total = packs.iter().map(|pack| pack.bytes).sum();
    let next = AtomicUsize::new(0);
    let problems = Mutex::new(Vec::new());
    let (sender, receiver) = channel();
    let work = |sender: Sender<u64>| -> Result<(), RepoError> {
        let mut scrubber = Scrubber {
            from,
            images,
            hasher: from.keys.hasher(),
            decoder: Decoder::new()?,
            external: ExternalReader::default(),
            sealed: Vec::new(),
            plain: Vec::new(),
        };
        while let Some(pack) = packs.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Err(error) = scrubber.scrub(pack) {
                let label = from.store.label(Area::Packs, &pack.name.to_string());
                crate::sync::lock(&problems).push(Problem::from_error(label, &error));
            }
            // The receiver outlives the threads.
            let _ = sender.send(pack.bytes);
        }
        Ok(())
    };
    let mut done = 0;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|_| {
                let sender = sender.clone();
                scope.spawn(|| work(sender))
            })
            .collect();
        drop(sender);
        for bytes in receiver {
            done += bytes;
            progress(Progress {
                phase: Phase::Data,
                done,
                total,
            });
        }
        threads.into_iter().try_for_each(|thread| {
            // If a thread panicked, the check must not pass.
            thread.join().unwrap_or(Err(RepoError::WriterFailed))
        })
    })?;
    let problems = problems
        .into_inner()
        .unwrap_or_else(|poisoned| poisoned.into_inner());
    Ok((problems, done))
}

struct Scrubber<'a> {
    from: &'a Repository,
    /// The images to read.
    images: &'a BTreeSet<ImageId>,
    hasher: ContentHasher,
    decoder: Decoder,
    external: ExternalReader,
    sealed: Vec<u8>,
    plain: Vec<u8>,
}

impl Scrubber<'_> {
    fn scrub(&mut self, pack: &PackFile) -> Result<(), RepoError> {
        let opened = open_directory(&self.from.store, &self.from.keys, pack.name, pack.bytes)?;
        let OpenedPack {
            file,
            cipher,
            label,
            directory,
            end,
        } = opened;
        let wrong = |error: FormatError| RepoError::format(&label, &error);
        self.compare_with_index(pack.name, &directory)
            .map_err(wrong)?;
        let mut whole = blake3::Hasher::new();
        whole.update(cipher.preamble());
        let mut offset = PREAMBLE_BYTES as u32;
        for (number, frame) in (0..).zip(&directory.frames) {
            self.sealed.resize(frame.stored_bytes as usize, 0);
            read_exact_at(&file, &mut self.sealed, offset.into(), &label)?;
            whole.update(&self.sealed);
            let info = FrameInfo {
                offset,
                stored_bytes: frame.stored_bytes,
                plain_bytes: frame.plain_bytes,
                kind: frame.kind,
            };
            self.verify_frame(&cipher, number, frame, info, wrong)?;
            offset += frame.stored_bytes;
        }
        whole.update(&end);
        match whole.finalize().as_bytes() == &pack.name.0 {
            true => Ok(()),
            false => Err(wrong(FormatError::Mismatch { what: "its name" })),
        }
    }

    /// Decodes the frame that was read, and hashes its blobs.
    fn verify_frame(
        &mut self,
        cipher: &PackCipher,
        number: u32,
        frame: &Frame,
        info: FrameInfo,
        wrong: impl Fn(FormatError) -> RepoError,
    ) -> Result<(), RepoError> {
        let payload = cipher
            .open_frame(number, info.kind, info.plain_bytes, &mut self.sealed)
            .map_err(&wrong)?;
        let is_external = info.kind == KIND_EXTERNAL;
        if is_external {
            let place = ExternalPlace::decode(payload).map_err(&wrong)?;
            if !self.images.contains(&place.image) {
                return Ok(());
            }
            let (images, bytes) = (&self.from.images, info.plain_bytes as usize);
            self.external.read(images, place, bytes, &mut self.plain)?;
        } else {
            decode_payload(&mut self.decoder, number, info, payload, &mut self.plain)
                .map_err(&wrong)?;
        }
        // The directory was checked: blobs fill the frame exactly.
        let lengths = frame.blobs.iter().map(|&(_, bytes)| bytes as usize);
        let found = self.hasher.ids_of(&self.plain, lengths).into_iter();
        let mut blobs = frame.blobs.iter().zip(found);
        match blobs.find(|((id, _), found)| id != found) {
            Some(_) if is_external => Err(self.external.changed()),
            Some(((id, _), _)) => {
                let what = format!("blob {id} has other contents");
                Err(wrong(FormatError::invalid(what)))
            }
            None => Ok(()),
        }
    }

    fn compare_with_index(&self, name: FileHash, directory: &Directory) -> Result<(), FormatError> {
        let Some(number) = self.from.index.pack_number(&name) else {
            return Ok(());
        };
        let indexed = self.from.index.frames_of(number);
        let indexed = indexed.map(|known| (known.kind, known.stored_bytes, known.plain_bytes));
        let found = directory.frames.iter();
        let found = found.map(|found| (found.kind, found.stored_bytes, found.plain_bytes));
        match indexed.eq(found) {
            true => Ok(()),
            false => Err(FormatError::invalid(
                "its directory is not what the index says",
            )),
        }
    }
}

/// A pack with its directory.
pub(crate) struct OpenedPack {
    pub(crate) file: File,
    pub(crate) cipher: PackCipher,
    pub(crate) label: String,
    pub(crate) directory: Directory,
    /// The bytes of the sealed directory and the tail.
    pub(crate) end: Vec<u8>,
}

/// Opens a pack, and reads and checks its directory without the index.
pub(crate) fn open_directory(
    store: &LocalStore,
    keys: &Keys,
    name: FileHash,
    file_bytes: u64,
) -> Result<OpenedPack, RepoError> {
    let (file, cipher, label) = open_pack(store, keys, name)?;
    let wrong = |error: FormatError| RepoError::format(&label, &error);
    let mut tail = [0; TAIL_BYTES];
    read_exact_at(
        &file,
        &mut tail,
        file_bytes.saturating_sub(TAIL_BYTES as u64),
        &label,
    )?;
    let range = decode_tail(tail, file_bytes).map_err(wrong)?;
    // Bounded by the file's length, which is bounded.
    let mut end = vec![0; (range.end - range.start) as usize];
    read_exact_at(&file, &mut end, range.start, &label)?;
    let directory = cipher
        .open_directory(tail, &mut end.clone())
        .map_err(wrong)?;
    if directory.file_bytes() != file_bytes {
        return Err(wrong(FormatError::invalid(
            "its length is not what its directory says",
        )));
    }
    end.extend_from_slice(&tail);
    Ok(OpenedPack {
        file,
        cipher,
        label,
        directory,
        end,
    })
}
