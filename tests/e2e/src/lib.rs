//! End-to-end tests of `stillframe`, in `tests/`: `functional`, `negative`, and `host`, which changes settings of the
//! whole host. They know it by its command line alone; `stillframe-harness` has the guests and QEMU's sockets.
