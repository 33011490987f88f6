//! Writes seed inputs for the fuzz targets into `corpus/TARGET/` of this folder: well-formed pieces of the format, made
//! by limosa's own encoders, so that a fuzzer begins behind the magic numbers.

use limosa_image::luks::NewHeader;
use limosa_image::qcow2::{CheckOptions, CreateOptions, change_bitmap, create};
use limosa_image::{BitmapAction, Disk, GuestOffset, Preallocation};
use limosa_storage::{Buffer, MemoryStorage, Storage, block_on};
use limosa_stream::mapped_ram::{HEADER_LENGTH, Layout};
use limosa_stream::multifd::{Compression, InitialPacket, PACKET_LEN, Packet};
use limosa_stream::{
    Command, Configuration, GlobalState, PageSizes, RamBlock, RecordEncoder, RecordKind, ReturnMessage, SectionHeader,
    SectionKind, devices, postcopy, ram, section,
};
use std::error::Error;
use std::fs;
use std::path::Path;
use std::time::Duration;

type Seeds = Vec<Vec<u8>>;

fn main() -> Result<(), Box<dyn Error>> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    for (target, seeds) in [
        ("main_channel", main_channel()?),
        ("return_path", return_path()?),
        ("colo", limosa_fuzz::colo::seeds()?),
        ("epoch_log", vec![vec![200, 3, 4, 0, 0, 0, 0, 0, 0, 0], vec![5, 8, 1, 0, 0, 0, 0, 0, 0, 0]]),
        ("gate_frames", gate_frames()),
        ("keep", limosa_fuzz::colo::keeper_seeds()?),
        ("command", command()?),
        ("mapped_ram", mapped_ram()?),
        ("device_tail", device_tail()?),
        ("guest_agent", vec![b"{\"return\": [1,\xff{\"return\": 7}\n\n{\"error\": {\"desc\": \"no\"}}\n".to_vec()]),
        ("libvirt_image", libvirt_image()),
        ("packed", packed()?),
        ("snapshot", snapshot()?),
        ("text", text()?),
        ("multifd", multifd()?),
        ("xbzrle", xbzrle()),
        ("balloon", balloon()),
        ("image_check", images()?),
        ("image_open", images()?.into_iter().map(|seed| seed[1 + 12 * 6..].to_vec()).collect()),
        ("image_name", image_names()),
        ("image_pipe", written_images()?),
        ("luks", vec![luks()?]),
        ("image_read", images()?),
        ("image_write", images()?),
        ("journal", vec![vec![48, 0, 9, 0], vec![52, 1, 9, 0, 0, 3, 1, 0]]),
        ("nbd", limosa_fuzz::nbd::seeds()),
        ("postcopy", limosa_fuzz::postcopy::seeds()?),
        ("working_set", working_set()),
        ("vhost_user", vec![limosa_vhost::fuzzing::seed()]),
        ("vhost_user_blk", limosa_fuzz::blk::seeds()),
    ] {
        let folder = corpus.join(target);
        fs::create_dir_all(&folder)?;
        for (number, seed) in seeds.iter().enumerate() {
            fs::write(folder.join(format!("seed-{number}")), seed)?;
        }
        println!("{target}: {} seeds", seeds.len());
    }
    Ok(())
}

/// A header with one stripe and one iteration in each slot.
fn luks() -> Result<Vec<u8>, Box<dyn Error>> {
    let (mut header, key) = NewHeader::default().iter_time(Duration::ZERO).make()?;
    header.set_slot(0, &key, b"passphrase", Duration::ZERO)?;
    header.key_iterations = 1;
    for (slot, sector) in header.slots.iter_mut().zip(2..) {
        (slot.iterations, slot.stripes, slot.key_sector) = (1, 1, sector);
    }
    header.payload_sector = 10;
    let mut seed = header.to_bytes().to_vec();
    seed.resize(11 * 512, 7);
    Ok(seed)
}

/// Frames in small pieces and at once, and one whose length is not possible.
fn gate_frames() -> Seeds {
    let frames: Vec<u8> = [1_u8, 60, 200].iter().flat_map(|&length| framed(&vec![length; length.into()])).collect();
    let broken = [&frames[..], &[0xff; 8]].concat();
    [(0, &frames), (255, &frames), (3, &broken)].map(|(piece, frames)| [&[piece][..], frames].concat()).into()
}

fn framed(payload: &[u8]) -> Vec<u8> {
    [&(payload.len() as u32).to_be_bytes(), payload].concat()
}

/// An array that is inflated and deflated, statistics, a list of free pages, a report.
fn balloon() -> Seeds {
    /// Bytes at a place of the guest's memory.
    fn write(place: u16, bytes: &[u8]) -> Vec<u8> {
        let [low, high] = place.to_le_bytes();
        [&[0, low, high, bytes.len() as u8], bytes].concat()
    }
    /// One buffer of a queue, which is then worked on.
    fn buffer(queue: u16, count: u16, address: u64, length: u32, writable: bool) -> Vec<u8> {
        let slot = (count - 1) % 16;
        let descriptor =
            [&address.to_le_bytes()[..], &length.to_le_bytes(), &[if writable { 2 } else { 0 }, 0, 0, 0]].concat();
        [
            write(0x400 * queue + 16 * slot, &descriptor),
            write(0x400 * queue + 0x204 + 2 * slot, &slot.to_le_bytes()),
            write(0x400 * queue + 0x202, &count.to_le_bytes()),
            vec![4, queue as u8, 0, 0],
        ]
        .concat()
    }
    let numbers: Vec<u8> = [3u32, 257, 258, 256, 259, 1 << 20].into_iter().flat_map(u32::to_le_bytes).collect();
    let array = |queue| [vec![0], write(0x1600, &numbers), buffer(queue, 1, 0x1600, 24, false)].concat();
    let entries = [&4u16.to_le_bytes()[..], &7u64.to_le_bytes(), &99u16.to_le_bytes(), &7u64.to_le_bytes()].concat();
    let statistics =
        [vec![0], write(0x1600, &entries), buffer(2, 1, 0x1600, 20, false), vec![11, 4, 0, 0, 4, 2, 0, 0]].concat();
    let list = [
        vec![0, 11, 0, 0, 0],
        write(0x1600, &0x8000_0000u32.to_le_bytes()),
        buffer(3, 1, 0x1600, 4, false),
        buffer(3, 2, 1 << 20, 0x4000, true),
        write(0x1600, &[0; 4]),
        buffer(3, 3, 0x1600, 4, false),
        vec![11, 2, 0, 0],
    ];
    let report = [vec![0], buffer(4, 1, 1 << 20, 0x8000, true)].concat();
    vec![array(0), array(1), statistics, list.concat(), report]
}

/// A whole mapped-ram file of two small blocks and one page with contents. Its parts stand closer together than QEMU
/// puts them, or there would be a megabyte of nothing between them.
fn snapshot() -> Result<Seeds, Box<dyn Error>> {
    let blocks = [RamBlock::new("pc.ram", 0x4000), RamBlock::new("rom", 0x1000)];
    let mut layout = Layout::plan(&Configuration::new("pc-q35-10.0"), 2, &blocks)?;
    let mut at = layout.blocks[0].header_offset;
    for block in &mut layout.blocks {
        block.header_offset = at;
        block.bitmap_offset = at + 1 + block.block.name.len() as u64 + 8 + HEADER_LENGTH as u64;
        block.pages_offset = (block.bitmap_offset + block.bitmap_length()).next_multiple_of(4096);
        at = block.end();
    }
    let mut seed = vec![0; at as usize];
    for chunk in layout.chunks()? {
        let begin = chunk.offset as usize;
        seed.resize(seed.len().max(begin + chunk.bytes.len()), 0);
        seed[begin..begin + chunk.bytes.len()].copy_from_slice(&chunk.bytes);
    }
    let first = &layout.blocks[0];
    seed[first.bitmap_offset as usize] = 0b100;
    seed[first.pages_offset as usize + 0x2000..][..0x1000].fill(0x5a);
    seed.extend(device_tail()?.into_iter().next().unwrap_or_default());
    assert!(limosa_snapshot::fuzz_open(&seed).is_ok(), "a seed is well-formed");
    Ok(vec![seed])
}

/// That file in an image of small clusters.
fn packed() -> Result<Seeds, Box<dyn Error>> {
    let folder = std::env::temp_dir().join(format!("limosa-seeds-{}", std::process::id()));
    fs::create_dir_all(&folder)?;
    let (plain, image) = (folder.join("vm"), folder.join("vm.qcow2"));
    fs::write(&plain, snapshot()?.concat())?;
    let mut options = limosa_pack::PackOptions::default();
    options.cluster_size = Some(4096);
    let pending = limosa_snapshot::UnnamedFile::create(&image, true)?;
    let handle = limosa_migrate::Handle::new();
    let snapshot = limosa_pack::open_snapshot(&plain, &limosa_pack::Access::default())?;
    limosa_pack::pack(&snapshot, pending, None, &options, &handle)?;
    let seed = fs::read(&image)?;
    fs::remove_dir_all(&folder)?;
    assert!(limosa_pack::fuzz_open(&seed).is_ok(), "a seed is well-formed");
    Ok(vec![seed])
}

/// Two ranges of two RAM blocks: magic, version, mode, id, times, number, ranges, and room for the checksum.
fn working_set() -> Seeds {
    let mut seed = [&b"limosa\x1aw\x01\0\0\0\x02\0\0\0"[..], &[7; 16], &[0; 16], &2_u64.to_le_bytes()].concat();
    for (first, block, pages) in [(3_u64, 1_u32, 2_u32), (4000, 0, 1000)] {
        seed.extend([&first.to_le_bytes()[..], &block.to_le_bytes(), &pages.to_le_bytes(), &[]].concat());
    }
    seed.extend([0; 4]);
    vec![seed]
}

/// Small images of several sorts, with requests all over them.
fn images() -> Result<Seeds, Box<dyn Error>> {
    let usual = CreateOptions::default().size(64 << 10).cluster_size(512);
    let sorts = [
        usual.clone(),
        usual.clone().version(2),
        usual.clone().refcount_bits(1).lazy_refcounts(true),
        usual.refcount_bits(64).preallocation(Preallocation::Metadata).size(8 << 10),
    ];
    let mut seeds = Vec::new();
    for options in sorts {
        let storage = MemoryStorage::growing_to(1 << 20);
        block_on(create(&storage, None, &options))?;
        if options.version > 2 {
            // They follow what is written, and are stored at the end.
            for granularity in [512, 4096] {
                let actions = [BitmapAction::Add { granularity: Some(granularity) }];
                let name = format!("b{granularity}");
                block_on(change_bitmap(&storage, &name, &actions, None, CheckOptions::default()))?;
            }
        }
        let image = Buffer::zeroed(usize::try_from(storage.length()?)?);
        block_on(storage.read(0, image.clone().into()))?;
        // Writes, zeros, discards and flushes, here and there.
        let mut seed = vec![12];
        for number in 0..12_u8 {
            seed.extend([number, number * 20, number.wrapping_mul(50), 0, 0x80, number % 4]);
        }
        let mut image = image.to_vec();
        seeds.push([&seed[..], &image].concat());
        // Its L1 table where the refcount table lies.
        image.copy_within(48..56, 40);
        seeds.push([&seed[..], &image].concat());
    }
    Ok(seeds)
}

/// Small images with contents, here and there on their disk.
fn written_images() -> Result<Seeds, Box<dyn Error>> {
    let usual = CreateOptions::default().size(64 << 10).cluster_size(512);
    let mut seeds = Vec::new();
    for options in [usual.clone(), usual.clone().version(2), usual.preallocation(Preallocation::Metadata)] {
        let storage = MemoryStorage::growing_to(1 << 20);
        block_on(create(&storage, None, &options))?;
        let disk = limosa_fuzz::image::open(&storage, false).ok_or("an image that was created opens")?;
        for at in [0, 700, 20 << 10, 63 << 10] {
            block_on(disk.write(GuestOffset(at), Buffer::from_slice(&[7; 1000]).into()))?;
        }
        block_on(disk.close())?;
        seeds.push(storage.contents());
    }
    Ok(seeds)
}

/// Names of images of every kind.
fn image_names() -> Seeds {
    [
        "folder/image",
        "nbd://host/disk",
        r#"json:{"driver":"qcow2","file":{"driver":"file","filename":"top"},"backing":{"driver":"raw","file.filename":"base"}}"#,
        "driver=raw,offset=512,size=1k,read-only=on,file.driver=file,file.filename=a,,b,file.locking=off,file.aio=threads",
        "driver=qcow2,file.filename=top,backing=,data-file.filename=data,cache.direct=on,cache.no-flush=off",
    ]
    .map(|name| name.as_bytes().to_vec())
    .into()
}

/// Save images of both byte orders, one with a cookie, without their streams.
fn libvirt_image() -> Seeds {
    let xml =
        b"<domain type='kvm'><name>a &amp; b</name><uuid>3f2504e0-4f89-41d3-9a0c-0305e82c3301</uuid></domain>\n\0";
    let image = |cookie: u32, word: fn(u32) -> [u8; 4]| {
        let mut seed = b"LibvirtQemudSave".to_vec();
        for number in [2, xml.len() as u32 + 40, 1, 0, cookie] {
            seed.extend(word(number));
        }
        seed.resize(92, 0);
        seed.extend_from_slice(xml);
        seed.extend_from_slice(b"<cookie/>");
        seed.resize(92 + xml.len() + 40, 0);
        seed
    };
    vec![image(0, u32::to_le_bytes), image(xml.len() as u32, u32::to_be_bytes)]
}

/// An initial packet, and packets with pages, with and without compression, and of none.
fn multifd() -> Result<Seeds, Box<dyn Error>> {
    let mut seeds = vec![InitialPacket { uuid: [7; 16], id: 1 }.encode().to_vec()];
    let pages = Packet { sync: false, block: "pc.ram", normal: &[0x1000, 0], zero: &[0x2000], ..Packet::sync(7) };
    for packet in [
        Packet::sync(1),
        Packet { payload_len: 0x2000, ..pages },
        Packet { payload_len: 99, compression: Compression::Zlib, ..pages },
        Packet { payload_len: 99, compression: Compression::Zstd, sync: true, ..pages },
    ] {
        let mut bytes = [0; PACKET_LEN];
        packet.encode(&mut bytes)?;
        seeds.push(bytes.to_vec());
    }
    Ok(seeds)
}

fn xbzrle() -> Seeds {
    vec![b"\x00\x01a\x02\x03bcd".to_vec(), b"\x80\x10\x02ab".to_vec(), vec![0xff; 600]]
}

fn text() -> Result<Seeds, Box<dyn Error>> {
    let table = "              Block Name    PSize              Offset               Used              Total\n\
                 pc.ram    4 KiB  0x0000000000000000 0x0000000008000000 0x0000000008000000 0x00007f\n";
    let mut seeds: Seeds =
        ["tcp:[::1]:4444", "unix:/run/vm/qmp", "fd:3", "file:/a,offset=4096", "exec:cat > /a", table]
            .map(|text| text.into())
            .into();
    let tail = tail(1)?;
    let json = tail.iter().position(|byte| *byte == b'{').unwrap_or(tail.len());
    seeds.push(tail[json..].to_vec());
    assert!(limosa_stream::vmdesc::decode(&tail[json..]).is_ok(), "a seed is well-formed");
    Ok(seeds)
}

fn configurations() -> Vec<Configuration> {
    let plain = Configuration::new("pc-i440fx-10.0");
    let full = Configuration {
        uuid: Some([7; 16]),
        target_page_bits: Some(12),
        capabilities: vec!["x-ignore-shared".into()],
        ..plain.clone()
    };
    vec![plain, full]
}

fn blocks() -> Vec<RamBlock> {
    vec![RamBlock::new("pc.ram", 0x10_0000), RamBlock::new("0000:00:02.0/vga.vram", 0x2000), RamBlock::new("a", 0x1000)]
}

/// The device section that QEMU sends before the pages, of a virtio-mem device of 256 MiB.
fn early_section() -> Result<Vec<u8>, Box<dyn Error>> {
    let (id, name) = (0x25, "0000:00:01.0/virtio-mem-device-early".to_owned());
    let mut early = Vec::new();
    SectionHeader { kind: SectionKind::Full, id, name, instance: 0, version: 1 }.encode(&mut early)?;
    for word in [0x1_0000_0000_u64, 0x1000_0000, 0x20_0000] {
        early.extend(word.to_be_bytes());
    }
    early.extend([0; 4 + 8 + 16]);
    section::encode_footer(id, &mut early);
    Ok(early)
}

fn main_channel() -> Result<Seeds, Box<dyn Error>> {
    let mut seeds = Seeds::new();
    let blocks = blocks();
    for configuration in configurations() {
        let listed: Vec<_> = blocks
            .iter()
            .map(|block| RamBlock {
                address: configuration.has_capability("x-ignore-shared").then_some(1),
                ..block.clone()
            })
            .collect();
        let mut stream = Vec::new();
        configuration.encode(&mut stream)?;
        ram::encode_ram_start(2, &listed, &mut stream)?;
        if !configuration.has_capability("x-ignore-shared") {
            stream.extend(early_section()?);
        }
        section::encode_part(2, &mut stream);
        let mut records = RecordEncoder::new(&listed)?;
        for (kind, block, offset) in [
            (RecordKind::Page, 0, 0),
            (RecordKind::Page, 0, 0x1000),
            (RecordKind::Zero, 0, 0x2000),
            (RecordKind::Zero, 1, 0),
            (RecordKind::Page, 2, 0),
        ] {
            records.append(kind, block, offset, &mut stream)?;
        }
        ram::encode_eos(2, &mut stream);
        Command::SwitchoverStart.encode(&mut stream)?;
        section::encode_end(2, &mut stream);
        ram::encode_eos(2, &mut stream);
        stream.extend(tail(2)?);
        seeds.push(stream);
    }
    let mut postcopy = Vec::new();
    let huge =
        [RamBlock { page_size: Some(0x20_0000), ..RamBlock::new("pc.ram", 0x20_0000) }, RamBlock::new("a", 0x1000)];
    postcopy::encode_postcopy_prologue(&Configuration::new("q35"), 2, &huge, &early_section()?, &mut postcopy)?;
    Command::Packaged { length: 1000 }.encode(&mut postcopy)?;
    section::encode_part(2, &mut postcopy);
    RecordEncoder::new(&huge)?.append(RecordKind::Zero, 1, 0, &mut postcopy)?;
    ram::encode_eos(2, &mut postcopy);
    section::encode_eof(&mut postcopy);
    seeds.push(postcopy);
    seeds.push(
        Layout::plan(&Configuration::new("q35"), 2, &blocks)?.chunks()?.into_iter().flat_map(|c| c.bytes).collect(),
    );
    Ok(seeds)
}

fn return_path() -> Result<Seeds, Box<dyn Error>> {
    let messages = [
        ReturnMessage::Pong(1),
        ReturnMessage::RequestPages { block: Some("pc.ram".into()), start: 0xcb000, length: 0x1000 },
        ReturnMessage::RequestPages { block: None, start: 0xcc000, length: 0x1000 },
        ReturnMessage::ReceivedBitmap { block: "a".into(), bitmap: vec![0xff; 16] },
        ReturnMessage::ResumeAck(1),
        ReturnMessage::SwitchoverAck,
        ReturnMessage::Shut(0),
    ];
    let mut seeds = Seeds::new();
    let mut all = Vec::new();
    for message in &messages {
        message.encode(&mut all)?;
        seeds.push(all.clone());
    }
    Ok(seeds)
}

fn command() -> Result<Seeds, Box<dyn Error>> {
    let commands = [
        Command::OpenReturnPath,
        Command::Ping(1),
        Command::PostcopyAdvise(None),
        Command::PostcopyAdvise(Some(PageSizes { summary: 0x1000, target: 0x1000 })),
        Command::PostcopyListen,
        Command::PostcopyRun,
        Command::RamDiscard { block: "pc.ram".into(), ranges: vec![0..0x1000, 0x3000..0x10_0000] },
        Command::Packaged { length: 214_015 },
        Command::EnableColo,
        Command::PostcopyResume,
        Command::ReceiveBitmap { block: "pc.ram".into() },
        Command::SwitchoverStart,
    ];
    let mut seeds = Seeds::new();
    for command in &commands {
        let mut seed = Vec::new();
        command.encode(&mut seed)?;
        seeds.push(seed);
    }
    for configuration in configurations() {
        let mut seed = Vec::new();
        configuration.with_mapped_ram().encode(&mut seed)?;
        seed.push(1);
        seeds.push(seed);
    }
    seeds.push(GlobalState { run_state: "paused".into(), was_suspended: Some(false) }.encode()?.to_vec());
    Ok(seeds)
}

fn mapped_ram() -> Result<Seeds, Box<dyn Error>> {
    let mut seeds = Seeds::new();
    for count in 1..=3 {
        let blocks: Vec<_> = blocks().into_iter().take(count).collect();
        let layout = Layout::plan(&Configuration::new("pc-i440fx-10.0"), 2, &blocks)?;
        let mut seed = Vec::new();
        let mut chunks = layout.chunks()?;
        if let Some(last) = chunks.last_mut() {
            section::encode_part(2, &mut last.bytes);
            ram::encode_eos(2, &mut last.bytes);
            Command::SwitchoverStart.encode(&mut last.bytes)?;
            section::encode_end(2, &mut last.bytes);
            ram::encode_eos(2, &mut last.bytes);
            last.bytes.extend_from_slice(b"\x04\0\0\0\0\x05timer");
        }
        for chunk in chunks {
            for (at, byte) in (chunk.offset..).zip(chunk.bytes) {
                let Some(at) = limosa_fuzz::folded(at) else { continue };
                if seed.len() <= at {
                    seed.resize(at + 1, 0);
                }
                seed[at] = byte;
            }
        }
        let read = |offset: u64, buffer: &mut [u8]| Ok(limosa_fuzz::read_folded(&seed, offset, buffer));
        assert_eq!(Layout::decode(read, 0, limosa_fuzz::FILE_LENGTH)?.blocks, layout.blocks, "a seed is well-formed");
        seeds.push(seed);
    }
    Ok(seeds)
}

fn device_tail() -> Result<Seeds, Box<dyn Error>> {
    let seeds = (0..4).map(tail).collect::<Result<Seeds, _>>()?;
    for seed in &seeds {
        assert_eq!(devices::find_tail_end(seed, 0, devices::TAIL_LIMIT)?.end, seed.len(), "a seed is well-formed");
    }
    Ok(seeds)
}

/// `count` device sections, the run state, and the description.
fn tail(count: u32) -> Result<Vec<u8>, Box<dyn Error>> {
    let mut tail = Vec::new();
    let mut devices = Vec::new();
    for id in 0..count {
        let name = format!("dev{id}");
        SectionHeader { kind: SectionKind::Full, id, name: name.clone(), instance: 0, version: 1 }.encode(&mut tail)?;
        tail.extend_from_slice(&[0xaa; 20]);
        tail.extend_from_slice(b"\x05\x08dev/more\0\0\0\x01\x11\x22");
        section::encode_footer(id, &mut tail);
        devices.push(format!(
            "{{\"name\":\"{name}\",\"instance_id\":0,\"vmsd_name\":\"dev\",\"version\":1,\"fields\":[{{\"name\":\"a\",\
             \"type\":\"uint32\",\"size\":4,\"array_len\":4}},{{\"name\":\"b\",\"type\":\"struct\",\"struct\":{{}},\
             \"size\":4}}],\"subsections\":[{{\"vmsd_name\":\"dev/more\",\"version\":1,\"fields\":[{{\"name\":\"c\",\
             \"type\":\"uint16\",\"size\":2}}]}}]}}"
        ));
    }
    SectionHeader { kind: SectionKind::Full, id: 99, name: "globalstate".into(), instance: 0, version: 1 }
        .encode(&mut tail)?;
    tail.extend_from_slice(&GlobalState { run_state: "running".into(), was_suspended: Some(false) }.encode()?);
    section::encode_footer(99, &mut tail);
    devices.push("{\"name\":\"globalstate\",\"instance_id\":0,\"size\":104}".into());
    section::encode_eof(&mut tail);
    let json = format!("{{\"configuration\":{{}},\"page_size\":4096,\"devices\":[{}]}}", devices.join(","));
    section::encode_description(json.as_bytes(), &mut tail)?;
    Ok(tail)
}
