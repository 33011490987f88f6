//! Bytes in motion for VM migration: URIs, vectored put and get, rate limit, time-outs, counters.
