//! Real guests for limosa's tests: the beat boot sector, Linux in QEMU, paused VMs with prefilled memory.
