//! Fuzz target: the options of QEMU's command line.
#![no_main]

use stillframe_qemu::arguments::{Backend, BackendWord, CommandLine, Properties};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let text = String::from_utf8_lossy(bytes);
    let arguments: Vec<String> = text.split('\0').map(str::to_owned).collect();
    let line = CommandLine::parse(&arguments);
    let again = CommandLine::parse(&line.to_argv());
    assert_eq!(again.to_argv(), line.to_argv());
    let _ = line.guest_name();
    for word in &arguments {
        let properties = Properties::parse(word, "driver");
        let rendered = properties.render("driver");
        assert_eq!(
            Properties::parse(&rendered, "driver").render("driver"),
            rendered
        );
        let backend = Backend::from_chardev(word);
        let rendered = backend.to_chardev();
        assert_eq!(
            Backend::from_chardev(&rendered).kind(),
            backend.kind(),
            "{rendered}"
        );
        assert_eq!(
            Backend::from_chardev(&rendered).id(),
            backend.id(),
            "{rendered}"
        );
        let _ = (backend.unix_path(), backend.tcp_address());
        let null = backend.replaced_by(&Backend::null());
        assert_eq!(null.kind(), "null");
        assert_eq!(null.id(), backend.id());
        if let BackendWord::Own { backend, .. } = BackendWord::parse(word) {
            let _ = backend.to_chardev();
        }
    }
});
