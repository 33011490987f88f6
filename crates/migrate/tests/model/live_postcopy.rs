//! A destination of a live migration that continues in postcopy, which keeps the rules as QEMU's does.

use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use limosa_channel::Channel;
use limosa_page::{PAGE_LEN, PageBitmap, PageNumber, PageRange};
use limosa_stream::{Command, Decoder, Event, OpaqueSection, RamBlock, ReturnMessage, Step};

use super::live::random;
use super::say;

/// The state of the destination.
#[derive(Debug, Default)]
pub struct Landed {
    pub blocks: Vec<RamBlock>,
    pub memory: Vec<Vec<u8>>,
    pub received: Vec<PageBitmap>,
    pub asked: Vec<(usize, u64)>,
    pub wrong: Vec<String>,
    /// The package came: the VM runs here.
    pub runs: bool,
    pub devices: usize,
    pub ended: bool,
    /// A channel of this connection was cut.
    cut_off: bool,
    /// Pages that came since the VM runs, over all channels.
    pub after: u64,
}

/// Where it breaks off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    /// When the first discard comes.
    Discard,
    /// When the package has come, before anything is said of it.
    Package,
    /// After this number of pages in postcopy.
    Pages(u64),
}

/// Reads the main channel, of a beginning or of a recovery, until the end or the cut; asks for pages by a seed.
pub fn receive(channel: &Channel, state: &Mutex<Landed>, recovery: bool, cut: Option<Cut>, seed: u64) {
    let decoder = match recovery {
        true => Decoder::for_recovery(&state.lock().unwrap().blocks, 2).unwrap(),
        false => Decoder::new(),
    };
    state.lock().unwrap().cut_off = false;
    let _ = read(channel, state, decoder, cut, seed);
    let _ = channel.shutdown(limosa_channel::Shutdown::Both);
}

/// Reads the preempt channel until it ends.
pub fn receive_urgent(channel: &Channel, state: &Mutex<Landed>, cut: Option<Cut>) {
    // It may be connected before the layout has been read.
    while state.lock().unwrap().blocks.is_empty() {
        thread::sleep(Duration::from_millis(1));
    }
    let decoder = Decoder::for_preempt_channel(&state.lock().unwrap().blocks).unwrap();
    let _ = read(channel, state, decoder, cut, 0);
    let _ = channel.shutdown(limosa_channel::Shutdown::Both);
}

struct Over;

fn fill(channel: &Channel, buffer: &mut Vec<u8>, total: usize) -> Result<(), Over> {
    let mut room = [0; 64 << 10];
    while buffer.len() < total {
        match channel.read(&mut room) {
            Ok(got) if got > 0 => buffer.extend_from_slice(&room[..got]),
            _ => return Err(Over),
        }
    }
    Ok(())
}

fn read(
    channel: &Channel,
    state: &Mutex<Landed>,
    mut decoder: Decoder,
    cut: Option<Cut>,
    mut seed: u64,
) -> Result<(), Over> {
    let mut buffer = Vec::new();
    loop {
        match decoder.step(&buffer) {
            Err(error) => {
                state.lock().unwrap().wrong.push(error.to_string());
                return Err(Over);
            }
            Ok(Step::Need(total)) => fill(channel, &mut buffer, total)?,
            Ok(Step::Event { consumed, event }) => {
                buffer.drain(..consumed);
                match event {
                    Event::RamStart(blocks) => {
                        let mut state = state.lock().unwrap();
                        state.memory =
                            blocks.iter().map(|block| vec![0; usize::try_from(block.used_length).unwrap()]).collect();
                        state.received = blocks.iter().map(|block| PageBitmap::new(block.pages())).collect();
                        state.blocks = blocks;
                    }
                    Event::Page { block, offset } => {
                        fill(channel, &mut buffer, PAGE_LEN)?;
                        let page: Vec<u8> = buffer.drain(..PAGE_LEN).collect();
                        state.lock().unwrap().land(block, offset, &page, cut)?;
                    }
                    Event::Zero { block, offset } => {
                        state.lock().unwrap().land(block, offset, &[0; PAGE_LEN], cut)?;
                    }
                    Event::Package { length } => {
                        let length = usize::try_from(length).unwrap();
                        fill(channel, &mut buffer, length)?;
                        let package: Vec<u8> = buffer.drain(..length).collect();
                        if cut == Some(Cut::Package) {
                            return Err(Over);
                        }
                        load(channel, state, &package);
                        ask(channel, state, &mut seed);
                    }
                    Event::Command(command) => {
                        if cut == Some(Cut::Discard) && matches!(command, Command::RamDiscard { .. }) {
                            return Err(Over);
                        }
                        obey(channel, state, &command);
                        if command == Command::PostcopyResume {
                            ask(channel, state, &mut seed);
                        }
                    }
                    Event::EndOfStream => {
                        // What was asked for may still be under way on the other channel.
                        for _ in 0..10_000 {
                            let state = state.lock().unwrap();
                            if state.unanswered() == 0 {
                                break;
                            }
                            if state.cut_off {
                                return Err(Over);
                            }
                            drop(state);
                            thread::sleep(Duration::from_millis(1));
                        }
                        state.lock().unwrap().ended = true;
                        say(channel, &ReturnMessage::Shut(0));
                        return Ok(());
                    }
                    Event::DeviceTail => panic!("no postcopy"),
                    _ => {}
                }
            }
        }
    }
}

fn load(channel: &Channel, state: &Mutex<Landed>, package: &[u8]) {
    let mut at = 0;
    while at < package.len() {
        if package[at] == limosa_stream::section::COMMAND {
            let (command, length) = Command::decode(&package[at..]).unwrap().unwrap();
            at += length;
            if let Command::Ping(token) = command {
                say(channel, &ReturnMessage::Pong(token));
            }
        } else {
            let (found, length) = OpaqueSection::decode_all(&package[at..]).unwrap();
            state.lock().unwrap().devices += found.len();
            at += length;
        }
    }
    let mut state = state.lock().unwrap();
    state.runs = true;
}

fn obey(channel: &Channel, state: &Mutex<Landed>, command: &Command) {
    let mut state = state.lock().unwrap();
    let index = |state: &Landed, name: &str| state.blocks.iter().position(|block| block.name == name).unwrap();
    match command {
        Command::Ping(token) => say(channel, &ReturnMessage::Pong(*token)),
        Command::RamDiscard { block, ranges } => {
            let block = index(&state, block);
            for range in ranges {
                let pages = PageRange::inside_bytes(range);
                state.received[block].clear_range(pages);
                let place = usize::try_from(range.start).unwrap()..usize::try_from(range.end).unwrap();
                state.memory[block][place].fill(0);
            }
        }
        Command::ReceiveBitmap { block } => {
            let bitmap = state.received[index(&state, block)].to_le_bytes();
            say(channel, &ReturnMessage::ReceivedBitmap { block: block.clone(), bitmap });
        }
        Command::PostcopyResume => {
            say(channel, &ReturnMessage::ResumeAck(1));
            let asked = std::mem::take(&mut state.asked);
            asked.iter().for_each(|(block, page)| state.ask(channel, *block, *page));
        }
        Command::OpenReturnPath | Command::PostcopyAdvise(Some(_)) => {}
        other => panic!("{other:?}"),
    }
}

/// Asks for a few pages that are not there.
fn ask(channel: &Channel, state: &Mutex<Landed>, seed: &mut u64) {
    let mut state = state.lock().unwrap();
    for _ in 0..40 {
        *seed = random(*seed | 1);
        let block = usize::try_from(*seed >> 50).unwrap() % state.blocks.len();
        let page = (*seed >> 20) % state.blocks[block].pages();
        state.ask(channel, block, page);
    }
}

impl Landed {
    fn ask(&mut self, channel: &Channel, block: usize, page: u64) {
        if !self.received[block].get(PageNumber(page)) && !self.asked.contains(&(block, page)) {
            self.asked.push((block, page));
            let block = Some(self.blocks[block].name.clone());
            say(channel, &ReturnMessage::RequestPages { block, start: page * 4096, length: 4096 });
        }
    }

    fn land(&mut self, block: usize, offset: u64, page: &[u8], cut: Option<Cut>) -> Result<(), Over> {
        if self.runs {
            if cut.is_some_and(|cut| matches!(cut, Cut::Pages(pages) if self.after >= pages)) {
                self.cut_off = true;
                return Err(Over);
            }
            self.after += 1;
        }
        let before = self.received[block].set(PageNumber(offset / 4096));
        if before && self.runs {
            self.wrong.push(format!("page {:#x} of block {block} came twice", offset));
        }
        let place = usize::try_from(offset).unwrap();
        self.memory[block][place..place + PAGE_LEN].copy_from_slice(page);
        Ok(())
    }

    /// Pages that were asked for and did not come.
    pub fn unanswered(&self) -> usize {
        self.asked.iter().filter(|(block, page)| !self.received[*block].get(PageNumber(*page))).count()
    }
}
