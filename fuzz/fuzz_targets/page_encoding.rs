//! Fuzz target: an encoded frame, its kind and its plain length.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: (u8, u16, &[u8])| {
    let (kind, plain_bytes, payload) = input;
    let Ok(mut decoder) = stillframe_page::encoding::Decoder::new() else {
        return;
    };
    let mut out = Vec::new();
    if decoder
        .decode(kind, payload, plain_bytes.into(), &mut out)
        .is_ok()
    {
        assert_eq!(out.len(), usize::from(plain_bytes));
    }
});
