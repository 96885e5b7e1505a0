//! Fuzz target: device states as QEMU saves them.
#![no_main]

use stillframe_qemu::device_state::{sections, unwrap, validate, validate_like, wrap};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = unwrap(bytes.to_vec());
    let Ok(summary) = validate(bytes) else {
        assert!(wrap(bytes, "pc-q35-10.0").is_err());
        assert!(validate_like(bytes, &["timer".to_owned()]).is_err());
        return;
    };
    let found = sections(bytes).expect("it is whole");
    let names: Vec<String> = found.iter().map(|section| section.name.clone()).collect();
    assert_eq!(names, summary.sections);
    let mut at = 8;
    for section in &found {
        assert!(section.data.start >= at + 15 && section.data.end >= section.data.start);
        at = section.data.end + 5;
    }
    assert_eq!(at + 1, bytes.len());
    assert_eq!(validate_like(bytes, &names), Ok(summary.clone()));
    // What is expected is found where it is there, and harmless where it is not.
    let fewer = &names[..names.len() - 1];
    assert!(validate_like(bytes, fewer).is_ok());
    let wrapped = wrap(bytes, "pc-q35-10.0").expect("it is whole");
    assert_eq!(wrapped.len(), bytes.len() + 1 + 4 + 11 + 1 + 4 + 2);
    assert_eq!(unwrap(bytes.to_vec()).as_deref(), Ok(bytes));
});
