//! Fuzz target: what a guest agent sends.
#![no_main]

use stillframe_qemu::guest_agent::AgentError;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    stillframe_qemu::fuzzing::agent_page_flags(bytes);
    if let Some(Err(AgentError::Command { desc, .. })) =
        stillframe_qemu::fuzzing::agent_answer(bytes)
    {
        assert!(desc.chars().count() <= 200 && !desc.contains(char::is_control));
    }
});
