//! Compares codecs and numbers of pages together: `cargo bench -p stillframe-page --bench codec`.
//!
//! Compresses memory in blocks of 4 to 128 KiB with Zstandard at three levels and with LZ4. Prints ratio and speed
//! (MB of plain bytes a second of processor time, one thread). Zero pages are left out, as the repository leaves
//! them out.
//! With a file name it uses that file (a raw image of guest memory); without, memory made here:
//! text, records with pointers, machine code, and some noise. Asserts nothing.

mod dice;

use stillframe_page::is_zero;

use dice::Dice;

const PAGE: usize = 4096;
const BYTES_MAX: usize = 96 << 20;
/// Pages of a large image are taken in runs of this many, to keep neighbours together.
const RUN: usize = 256;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const WORDS: [&str; 24] = [
    "the",
    "page",
    "kernel",
    "of",
    "memory",
    "/usr/lib/",
    "request",
    "a",
    "int",
    "struct ",
    "0x",
    "\n",
    "error: ",
    "GET /index",
    "file",
    "return",
    "to",
    "is",
    "=\"",
    "user",
    "root",
    "data",
    " {\n    ",
    "};",
];

fn text(dice: &mut Dice, out: &mut Vec<u8>) {
    let end = out.len() + PAGE;
    while out.len() < end {
        out.extend_from_slice(WORDS[dice.below(24) as usize].as_bytes());
        match dice.below(4) {
            0 => out.extend_from_slice(dice.below(10_000).to_string().as_bytes()),
            _ => out.push(b' '),
        }
    }
    out.truncate(end);
}

/// Objects as an allocator lays them out: pointers into one heap, lengths, flags, slack.
fn records(dice: &mut Dice, out: &mut Vec<u8>) {
    let end = out.len() + PAGE;
    let heap = 0x7f3a_0000_0000 + (dice.below(16) << 24);
    while out.len() < end {
        for _ in 0..2 {
            out.extend_from_slice(&(heap + (dice.below(1 << 20) & !15)).to_le_bytes());
        }
        out.extend_from_slice(&dice.below(200).to_le_bytes());
        out.extend_from_slice(&[1, 0, 0, 0]);
        out.extend_from_slice(&(dice.next() as u32).to_le_bytes());
        out.resize(out.len() + 8 * dice.below(5) as usize, 0);
    }
    out.truncate(end);
}

fn noise(dice: &mut Dice, out: &mut Vec<u8>) {
    for _ in 0..PAGE / 8 {
        out.extend_from_slice(&dice.next().to_le_bytes());
    }
}

/// Runs of pages of one sort, as processes leave them.
fn made_memory() -> Result<Vec<u8>> {
    let mut dice = Dice(7);
    let code = std::fs::read(std::env::current_exe()?)?;
    let mut code = code.chunks_exact(PAGE).cycle();
    let mut out = Vec::new();
    while out.len() < 64 << 20 {
        let sort = dice.below(20);
        for _ in 0..1 + dice.below(40) {
            match sort {
                0..6 => text(&mut dice, &mut out),
                6..14 => records(&mut dice, &mut out),
                14..18 => out.extend_from_slice(code.next().unwrap_or(&[1; PAGE])),
                _ => noise(&mut dice, &mut out),
            }
        }
    }
    Ok(out)
}

/// Compresses one block, or decompresses it into as many bytes as it had.
trait Codec {
    fn pack(&mut self, plain: &[u8], out: &mut Vec<u8>) -> Result<()>;
    fn unpack(&mut self, packed: &[u8], plain: &mut [u8]) -> Result<()>;
}

struct Zstd(
    zstd::bulk::Compressor<'static>,
    zstd::bulk::Decompressor<'static>,
);

impl Codec for Zstd {
    fn pack(&mut self, plain: &[u8], out: &mut Vec<u8>) -> Result<()> {
        out.resize(zstd::zstd_safe::compress_bound(plain.len()), 0);
        let bytes = self.0.compress_to_buffer(plain, out.as_mut_slice())?;
        out.truncate(bytes);
        Ok(())
    }

    fn unpack(&mut self, packed: &[u8], plain: &mut [u8]) -> Result<()> {
        self.1.decompress_to_buffer(packed, plain)?;
        Ok(())
    }
}

struct Lz4;

impl Codec for Lz4 {
    fn pack(&mut self, plain: &[u8], out: &mut Vec<u8>) -> Result<()> {
        out.resize(lz4_flex::block::get_maximum_output_size(plain.len()), 0);
        let bytes = lz4_flex::block::compress_into(plain, out)?;
        out.truncate(bytes);
        Ok(())
    }

    fn unpack(&mut self, packed: &[u8], plain: &mut [u8]) -> Result<()> {
        lz4_flex::block::decompress_into(packed, plain)?;
        Ok(())
    }
}

/// Time this thread has had a processor: other work on the machine counts less than by the clock.
fn cpu_seconds() -> Result<f64> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat")?;
    let nanoseconds: u64 = text.split(' ').next().unwrap_or_default().parse()?;
    Ok(nanoseconds as f64 / 1e9)
}

/// The result of compressing in blocks: bytes stored (a block that does not shrink by 1/16 counts in full), and the
/// speeds in MB/s of plain bytes.
fn measure(codec: &mut dyn Codec, memory: &[u8], block: usize) -> Result<(usize, f64, f64)> {
    let mut packed: Vec<Vec<u8>> = memory.chunks(block).map(|_| Vec::new()).collect();
    let started = cpu_seconds()?;
    for (plain, out) in memory.chunks(block).zip(&mut packed) {
        codec.pack(plain, out)?;
    }
    let packing = cpu_seconds()? - started;
    let mut plain = vec![0; block];
    let mut intact = true;
    let started = cpu_seconds()?;
    for (bytes, source) in packed.iter().zip(memory.chunks(block)) {
        codec.unpack(bytes, &mut plain[..source.len()])?;
        intact &= plain[..source.len()] == *source;
    }
    let unpacking = cpu_seconds()? - started;
    if !intact {
        return Err("a codec did not give back what it was given".into());
    }
    let stored = packed.iter().zip(memory.chunks(block));
    let stored = stored.map(
        |(bytes, plain)| match bytes.len() <= plain.len() - plain.len() / 16 {
            true => bytes.len(),
            false => plain.len(),
        },
    );
    let megabytes = memory.len() as f64 / 1e6;
    Ok((stored.sum(), megabytes / packing, megabytes / unpacking))
}

fn main() -> Result<()> {
    let file = std::env::args()
        .skip(1)
        .find(|argument| !argument.starts_with('-'));
    let image = match &file {
        Some(name) => std::fs::read(name)?,
        None => made_memory()?,
    };
    let pages: Vec<&[u8]> = image
        .chunks_exact(PAGE)
        .filter(|page| !is_zero(page))
        .collect();
    // Of a large image every n-th run of pages, so that all of it has a say.
    let every = (pages.len() * PAGE).div_ceil(BYTES_MAX).max(1);
    let memory: Vec<u8> = pages
        .chunks(RUN)
        .step_by(every)
        .flatten()
        .copied()
        .flatten()
        .copied()
        .collect();
    println!(
        "{}: {} pages, zero pages left out",
        file.as_deref().unwrap_or("made memory"),
        memory.len() / PAGE
    );
    println!(
        "{:<10} {:>8} {:>7} {:>10} {:>12}",
        "codec", "block", "ratio", "pack MB/s", "unpack MB/s"
    );
    for block in [4 << 10, 16 << 10, 64 << 10, 128 << 10] {
        for (name, level) in [
            ("zstd -1", Some(-1)),
            ("zstd 1", Some(1)),
            ("zstd 3", Some(3)),
            ("zstd 6", Some(6)),
            ("zstd 9", Some(9)),
            ("lz4", None),
        ] {
            let mut codec: Box<dyn Codec> = match level {
                Some(level) => Box::new(Zstd(
                    zstd::bulk::Compressor::new(level)?,
                    zstd::bulk::Decompressor::new()?,
                )),
                None => Box::new(Lz4),
            };
            let (stored, pack, unpack) = measure(&mut *codec, &memory, block)?;
            let ratio = memory.len() as f64 / stored as f64;
            println!(
                "{name:<10} {:>4} KiB {ratio:>7.2} {pack:>10.0} {unpack:>12.0}",
                block >> 10
            );
        }
    }
    Ok(())
}
