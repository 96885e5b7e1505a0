//! The launch helper alone, for the tests of this crate; `stillframe` has it as a hidden subcommand.

fn main() {
    std::process::exit(stillframe_qemu::launch::helper::run());
}
