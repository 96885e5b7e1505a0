//! Reads frames: fetches them from their packs, opens and decodes them, and cuts them into blobs.

use std::fs::File;

use stillframe_page::encoding::{Decoder, Kind};
use stillframe_page::hash::{ContentHasher, ContentId};

use crate::blobs::Blobs;
use crate::error::RepoError;
use crate::format::layout::FormatError;
use crate::images::external_reader::ExternalReader;
use crate::pack::external_frame::ExternalPlace;
use crate::pack::open::{decode_payload, open_pack};
use crate::pack::place::Place;
use crate::pack::place::Wanted;
use crate::pack::{KIND_EXTERNAL, PackCipher};
use crate::store::read_exact_at;

/// Packs kept open: enough for random reads in 2 GiB of packs.
const PACKS_OPEN: usize = 32;

/// Receives blobs: the tag of the first, and the bytes of all.
type RunSink<'h, T, E> = dyn Fn(T, &[u8]) -> Result<(), E> + 'h;

/// Reads and decodes frames; the state of one thread.
pub(crate) struct FrameReader<'a> {
    from: Blobs<'a>,
    hasher: ContentHasher,
    decoder: Decoder,
    external: ExternalReader,
    /// The open packs; the last is the one in use.
    packs: Vec<OpenPack>,
    sealed: Vec<u8>,
    /// The buffer of decoded bytes, where the plain bytes of the last frame lie, and a location in that frame.
    plain: Vec<u8>,
    plain_at: PlainAt,
    decoded: Option<Place>,
}

/// Where the plain bytes of a frame are.
enum PlainAt {
    /// In `FrameReader::plain`.
    Plain,
    /// There, too; they were read from the image that was used last.
    Image,
    /// In `FrameReader::sealed` from this offset on: a frame stored raw is not copied.
    Sealed(usize),
}

struct OpenPack {
    number: u32,
    file: File,
    label: String,
    cipher: PackCipher,
}

impl<'a> FrameReader<'a> {
    pub(crate) fn new(from: Blobs<'a>) -> Result<FrameReader<'a>, RepoError> {
        Ok(FrameReader {
            hasher: from.keys.hasher(),
            from,
            decoder: Decoder::new()?,
            external: ExternalReader::default(),
            packs: Vec::new(),
            sealed: Vec::new(),
            plain: Vec::new(),
            plain_at: PlainAt::Plain,
            decoded: None,
        })
    }

    /// Reads a run of neighbouring frames and passes the wanted blobs to `sink`, adjacent blobs whose tags
    /// `joins` accepts in one call.
    pub(crate) fn read_run<T: Copy, E: From<RepoError>>(
        &mut self,
        run: &[Wanted<T>],
        joins: fn(T, T) -> bool,
        sink: &RunSink<'_, T, E>,
    ) -> Result<(), E> {
        let (Some(first), Some(last)) = (run.first(), run.last()) else {
            return Ok(());
        };
        let start = first.at.info.offset;
        let bytes = (last.at.frame_end() - start) as usize;
        self.open_pack(first.at.pack)?;
        self.fetch(start, bytes)?;
        let follows = |a: &Wanted<T>, b: &Wanted<T>| {
            a.at.same_frame(&b.at) && a.at.offset + a.at.bytes == b.at.offset && joins(a.tag, b.tag)
        };
        let mut verified: Option<(ContentId, Place)> = None;
        for group in run.chunk_by(follows) {
            let ([first, .., last] | [first @ last]) = group else {
                continue;
            };
            if !self.is_decoded(&first.at) {
                self.decode(&first.at, start)?;
            }
            let bytes = last.at.offset + last.at.bytes - first.at.offset;
            let together = self.slice(&Place { bytes, ..first.at })?;
            // A blob that is wanted several times is hashed once.
            let is_verified = verified.is_some_and(|(id, at)| {
                id == first.id && at.same_frame(&first.at) && group.len() == 1
            });
            if !is_verified {
                self.verify_all(group, together)?;
                verified = Some((last.id, last.at));
            }
            sink(first.tag, together)?;
        }
        Ok(())
    }

    /// Reads and decodes the frame of `at`, unless it was decoded last.
    pub(crate) fn read_frame(&mut self, at: &Place) -> Result<(), RepoError> {
        // Also if it is decoded already: errors name the pack in use.
        self.open_pack(at.pack)?;
        if self.is_decoded(at) {
            return Ok(());
        }
        self.fetch(at.info.offset, at.info.stored_bytes as usize)?;
        self.decode(at, at.info.offset)
    }

    fn is_decoded(&self, at: &Place) -> bool {
        self.decoded.is_some_and(|decoded| decoded.same_frame(at))
    }

    /// A blob of the last decoded frame, which must contain `at`, verified against its id.
    pub(crate) fn blob(&self, at: &Place, id: &ContentId) -> Result<&[u8], RepoError> {
        let blob = self.slice(at)?;
        self.verify(id, blob)?;
        Ok(blob)
    }

    /// Several adjacent blobs that were verified before.
    pub(crate) fn together(&self, first: &Place, bytes: u32) -> Result<&[u8], RepoError> {
        self.slice(&Place { bytes, ..*first })
    }

    /// Closes the packs: after a failure they may be on a file system that is gone.
    pub(crate) fn close_packs(&mut self) {
        self.decoded = None;
        self.packs.clear();
        self.external.close();
    }

    /// Opens a pack and makes it the one in use.
    pub(crate) fn open_pack(&mut self, number: u32) -> Result<(), RepoError> {
        if let Some(at) = self.packs.iter().position(|pack| pack.number == number) {
            let pack = self.packs.remove(at);
            self.packs.push(pack);
            return Ok(());
        }
        if self.packs.len() >= PACKS_OPEN {
            self.packs.remove(0);
        }
        let name = self.from.index.pack_name(number);
        let (file, cipher, label) = open_pack(self.from.store, self.from.keys, name)?;
        self.packs.push(OpenPack {
            number,
            file,
            label,
            cipher,
        });
        Ok(())
    }

    fn fetch(&mut self, offset: u32, bytes: usize) -> Result<(), RepoError> {
        let Some(pack) = self.packs.last() else {
            return Ok(());
        };
        self.decoded = None;
        self.sealed.resize(bytes, 0);
        read_exact_at(&pack.file, &mut self.sealed, offset.into(), &pack.label)
    }

    /// Decodes the frame of `at` from a fetched run that starts at `run_start` in the file.
    fn decode(&mut self, at: &Place, run_start: u32) -> Result<(), RepoError> {
        let frame = at.info;
        let Some(pack) = self.packs.last() else {
            return Ok(());
        };
        self.decoded = None;
        let from = (frame.offset - run_start) as usize;
        let sealed = &mut self.sealed[from..from + frame.stored_bytes as usize];
        let wrong = |error: FormatError| RepoError::format(&pack.label, &error);
        let opened = pack
            .cipher
            .open_frame(at.frame, frame.kind, frame.plain_bytes, sealed);
        let payload = opened.map_err(wrong)?;
        if frame.kind == KIND_EXTERNAL {
            let place = ExternalPlace::decode(payload).map_err(wrong)?;
            let (images, bytes) = (self.from.images, frame.plain_bytes as usize);
            self.external.read(images, place, bytes, &mut self.plain)?;
            self.plain_at = PlainAt::Image;
            self.decoded = Some(*at);
            return Ok(());
        }
        let as_it_is = payload.len() == frame.plain_bytes as usize;
        self.plain_at = match as_it_is && frame.kind == Kind::Raw.number() {
            true => PlainAt::Sealed(from),
            false => {
                let decoder = &mut self.decoder;
                decode_payload(decoder, at.frame, frame, payload, &mut self.plain)
                    .map_err(wrong)?;
                PlainAt::Plain
            }
        };
        self.decoded = Some(*at);
        Ok(())
    }

    fn slice(&self, at: &Place) -> Result<&[u8], RepoError> {
        let range = at.offset as usize..at.offset as usize + at.bytes as usize;
        let plain = match self.plain_at {
            PlainAt::Plain | PlainAt::Image => &self.plain[..],
            PlainAt::Sealed(from) => &self.sealed[from..from + at.info.plain_bytes as usize],
        };
        plain
            .get(range)
            .ok_or_else(|| self.damaged("a blob reaches beyond its frame"))
    }

    /// Verifies adjacent blobs.
    fn verify_all<T>(&self, group: &[Wanted<T>], together: &[u8]) -> Result<(), RepoError> {
        let lengths = group.iter().map(|wanted| wanted.at.bytes as usize);
        let found = self.hasher.ids_of(together, lengths);
        let mut blobs = group.iter().zip(found);
        match blobs.find(|(wanted, found)| wanted.id != *found) {
            Some((wanted, _)) => Err(self.other_contents(&wanted.id)),
            None => Ok(()),
        }
    }

    fn verify(&self, id: &ContentId, blob: &[u8]) -> Result<(), RepoError> {
        match self.hasher.id(blob) == *id {
            true => Ok(()),
            false => Err(self.other_contents(id)),
        }
    }

    fn other_contents(&self, id: &ContentId) -> RepoError {
        match self.plain_at {
            PlainAt::Image => self.external.changed(),
            _ => self.damaged(&format!("blob {id} has other contents")),
        }
    }

    fn damaged(&self, what: &str) -> RepoError {
        let label = self.packs.last().map(|pack| pack.label.clone());
        RepoError::Damaged {
            file: label.unwrap_or_default(),
            what: what.into(),
        }
    }
}
