//! Fuzz target: what a guest agent sends.
#![no_main]

use stillframe_qemu::guest_agent::AgentError;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Some(Err(AgentError::Command { desc, .. })) =
        stillframe_qemu::fuzzing::agent_answer(bytes)
    {
        assert!(desc.chars().count() <= 200 && !desc.contains(char::is_control));
    }
});
