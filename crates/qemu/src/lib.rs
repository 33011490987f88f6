//! A QMP client and what drives a QEMU process through save and restore.
