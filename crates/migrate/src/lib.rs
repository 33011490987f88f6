//! Migration engines: source and destination roles over any place that pages come from or go to.
