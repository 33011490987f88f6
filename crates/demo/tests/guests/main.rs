//! The built-in guests: threads, and vCPUs of KVM.

mod acts;

mod kvm;
mod threads;
