//! How many pages go behind one header: each behind its own, as records on the main channel; or up to 128 in a packet
//! on a channel beside it.

use limosa_channel::ZeroCopy;

use super::send_options::SendOptions;
use super::stage::{Link, Stage};
use crate::caches::Caches;
use crate::frame::{Contestant, Frame, Series};
use crate::options::Options;
use crate::report::{Report, gib_or_mib, ratio};

const RECORDS: &str = "1 page, a record";

/// Pages of a packet.
const PACKETS: [(&str, usize); 3] = [("1 page, a packet", 1), ("64 pages, a packet", 64), ("128 pages, a packet", 128)];

fn case(memory: u64) -> String {
    format!("headers, {}, cold, over tcp", gib_or_mib(memory))
}

/// Those that are wanted.
pub(super) fn contestants<'s>(options: &'s Options, stage: &'s Stage<'_>, memory: u64) -> Vec<Contestant<'s>> {
    let packet = |(variant, pages)| {
        (variant, SendOptions { packet_pages: Some(pages), ..SendOptions::multifd(1).leaving(ZeroCopy::Off) })
    };
    let all = [(RECORDS, SendOptions::default())].into_iter().chain(PACKETS.map(packet));
    all.filter(|(variant, _)| options.wants(&case(memory), variant))
        .map(|(variant, way)| Contestant {
            case: case(memory),
            variant: variant.into(),
            run: Box::new(move |_: &Frame| stage.send(Link::Tcp, way, Caches::Cold, || Ok(()))),
        })
        .collect()
}

/// Whether any of them is wanted.
pub(super) fn wanted(options: &Options, memory: u64) -> bool {
    let mut variants = PACKETS.iter().map(|(variant, _)| *variant).chain([RECORDS]);
    variants.any(|variant| options.wants(&case(memory), variant))
}

pub(super) fn compare(report: &mut Report, all: &[Series], memory: u64) {
    for (variant, _) in PACKETS {
        for figure in ["wall", "cpu", "bytes"] {
            report.ratios.extend(ratio(all, &case(memory), variant, RECORDS, figure));
        }
    }
}
