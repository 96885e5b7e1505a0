//! Fuzz target: the disk image that holds a device state: the state is found again where the tables of
//! the image say.
#![no_main]

const CLUSTER: usize = 64 << 10;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Some((&times, state)) = bytes.split_first() else {
        return;
    };
    let state = state.repeat(usize::from(times));
    let image = stillframe_qemu::fuzzing::state_image(&state, "state").expect("short");
    assert_eq!(image.len() % CLUSTER, 0);
    let word = |at: usize| u64::from_be_bytes(image[at..at + 8].try_into().expect("eight"));
    let place = |at: usize| (word(at) & 0x00ff_ffff_ffff_fe00) as usize;
    // Header: the snapshot table; its first entry: the L1 table, whose second entry has the state.
    let snapshots = word(64) as usize;
    let l2 = place(place(snapshots) + 8);
    for (number, piece) in state.chunks(CLUSTER).enumerate() {
        let at = place(l2 + 8 * number);
        assert_eq!(&image[at..at + piece.len()], piece);
    }
});
