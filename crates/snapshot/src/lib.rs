//! A stored VM: QEMU's mapped-ram file with limosa's trailer, as a page sink while saving and a page source while restoring.
