//! Bytes together with descriptors over a Unix socket (SCM_RIGHTS, unix(7)).

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

/// Upper bound on the descriptors in one message (SCM_MAX_FD).
const DESCRIPTORS_MAX: usize = 253;

/// Sends all the bytes, and the descriptors with the first of them.
///
/// # Errors
/// `InvalidInput` without a byte to carry the descriptors, or with more than 253 of them; otherwise
/// what the socket says. After an error part of the bytes may have been sent.
pub fn send(socket: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    if bytes.is_empty() || fds.len() > DESCRIPTORS_MAX {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "descriptors travel with at least one byte, and at most 253 at a time",
        ));
    }
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut sent = 0;
    while sent < bytes.len() {
        let mut control = SendAncillaryBuffer::new(&mut space);
        if sent == 0 && !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        let data = [IoSlice::new(&bytes[sent..])];
        match rustix::net::sendmsg(socket, &data, &mut control, SendFlags::NOSIGNAL) {
            Ok(count) => sent += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

/// Receives the available bytes, at most `into.len()` (0 at the end of the stream), and the descriptors that came
/// with them, all close-on-exec.
///
/// # Errors
/// The errors of the socket; `InvalidData` when descriptors were lost on the way (too many open files). The
/// descriptors that did arrive are closed again.
pub fn receive(socket: &UnixStream, into: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let message = loop {
        let mut data = [IoSliceMut::new(into)];
        match rustix::net::recvmsg(socket, &mut data, &mut control, flags) {
            Err(rustix::io::Errno::INTR) => {}
            other => break other?,
        }
    };
    let mut fds = Vec::new();
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = part {
            fds.extend(received);
        }
    }
    if message.flags.contains(ReturnFlags::CTRUNC) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "descriptors were lost on the way: raise the limit of open files",
        ));
    }
    Ok((message.bytes, fds))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::{Read, Write};
    use std::os::fd::AsFd;

    #[test]
    fn descriptors_arrive_with_the_first_byte() {
        let (near, far) = UnixStream::pair().unwrap();
        let (reader, mut writer) = std::io::pipe().unwrap();
        send(&near, b"take this", &[reader.as_fd(), near.as_fd()]).unwrap();
        drop(reader);
        let mut buffer = [0; 64];
        let (count, fds) = receive(&far, &mut buffer).unwrap();
        assert_eq!(&buffer[..count], b"take this");
        assert_eq!(fds.len(), 2);
        for fd in &fds {
            let flags = rustix::io::fcntl_getfd(fd).unwrap();
            assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
        }
        writer.write_all(b"hi").unwrap();
        drop(writer);
        let mut text = String::new();
        File::from(fds.into_iter().next().unwrap())
            .read_to_string(&mut text)
            .unwrap();
        assert_eq!(text, "hi");
    }

    #[test]
    fn bytes_alone_arrive_whole_and_end() {
        let (near, far) = UnixStream::pair().unwrap();
        let content: Vec<u8> = (0..1_000_000_u32).map(|at| at as u8).collect();
        let sent = content.clone();
        let sender = std::thread::spawn(move || send(&near, &sent, &[]).unwrap());
        let (mut received, mut buffer) = (Vec::<u8>::new(), [0; 4096]);
        loop {
            let (count, fds) = receive(&far, &mut buffer).unwrap();
            assert!(fds.is_empty());
            received.extend(&buffer[..count]);
            if count == 0 {
                break;
            }
        }
        sender.join().unwrap();
        assert!(received == content);
    }

    #[test]
    fn as_many_as_fit_and_no_more() {
        let (near, far) = UnixStream::pair().unwrap();
        let many = vec![far.as_fd(); DESCRIPTORS_MAX];
        send(&near, b"x", &many).unwrap();
        assert_eq!(receive(&far, &mut [0; 8]).unwrap().1.len(), DESCRIPTORS_MAX);
        for result in [
            send(&near, b"", &[far.as_fd()]),
            send(&near, b"x", &[far.as_fd(); 254]),
        ] {
            assert_eq!(result.unwrap_err().kind(), io::ErrorKind::InvalidInput);
        }
    }
}
