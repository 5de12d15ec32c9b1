// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The TPM against an emulator that says what a test wants, and against swtpm where it is installed.

#![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]

use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

use proptest::prelude::*;
use tempfile::TempDir;
use vmm_sys_util::signal::{Killable as _, SIGRTMIN, register_signal_handler};
use vmm_sys_util::sock_ctrl_msg::ScmSocket as _;

use super::emulator::ANSWER_WITHIN;
use super::*;

const GPA: u64 = 0xfed4_0000;
const BUFFER: u64 = 0x80;
const LONG: Duration = Duration::from_secs(20);

/// `TPM2_CC_Startup(CLEAR)`, and `TPM2_CC_GetRandom` of 8 bytes.
const STARTUP: [u8; 12] = [0x80, 0x01, 0, 0, 0, 12, 0, 0, 0x01, 0x44, 0, 0];
const RANDOM: [u8; 12] = [0x80, 0x01, 0, 0, 0, 12, 0, 0, 0x01, 0x7b, 0, 8];

fn read(tpm: &Tpm, offset: u64) -> u32 {
    let mut bytes = [0; 4];
    tpm.read(offset, &mut bytes);
    u32::from_le_bytes(bytes)
}

fn write(tpm: &Tpm, offset: u64, value: u32) {
    tpm.write(offset, &value.to_le_bytes());
}

fn start(tpm: &Tpm, command: &[u8]) {
    write(tpm, 0x40, 1);
    for (at, byte) in (BUFFER..).zip(command) {
        tpm.write(at, &[*byte]);
    }
    write(tpm, 0x4c, 1);
}

/// Waits for the end of the command, and returns the response's length and code.
#[track_caller]
fn response(tpm: &Tpm) -> (u32, u32) {
    let began = Instant::now();
    while read(tpm, 0x4c) != 0 {
        assert!(began.elapsed() < LONG, "no response");
        std::thread::yield_now();
    }
    (read(tpm, BUFFER + 2).swap_bytes(), read(tpm, BUFFER + 6).swap_bytes())
}

/// An emulator that answers each control request, and what it was asked.
struct Scripted {
    folder: TempDir,
    asked: Receiver<(u32, Vec<u8>)>,
    data: Receiver<UnixStream>,
}

/// What the scripted emulator says instead of what it should.
#[derive(Clone, Copy, Default)]
struct Lies {
    lacks: u32,
    buffer_bytes: Option<u32>,
    blob_bytes: Option<u32>,
    refuses: Option<u32>,
    /// To which request no answer comes.
    is_silent_at: Option<u32>,
    /// To which request an answer comes a moment later.
    hesitates_at: Option<u32>,
}

impl Scripted {
    fn start(lies: Lies) -> Self {
        let folder = TempDir::new().unwrap();
        let listener = UnixListener::bind(folder.path().join("socket")).unwrap();
        let (asked_sender, asked) = channel();
        let (data_sender, data) = channel();
        std::thread::spawn(move || {
            let (mut control, _) = listener.accept().unwrap();
            loop {
                let mut command = [0; 4];
                // The descriptor comes with the first byte of its request.
                let Ok((got, file)) = control.recv_with_fd(&mut command) else { return };
                if got != 4 {
                    return;
                }
                if let Some(file) = file {
                    let _ = data_sender.send(std::os::fd::OwnedFd::from(file).into());
                }
                let command = u32::from_be_bytes(command);
                let mut body = vec![
                    0;
                    match command {
                        2 | 17 => 4,
                        12 | 13 => 12,
                        _ => 0,
                    }
                ];
                control.read_exact(&mut body).unwrap();
                if command == 13 {
                    let len = u32::from_be_bytes(body[8..12].try_into().unwrap());
                    let mut blob = vec![0; len as usize];
                    control.read_exact(&mut blob).unwrap();
                    body.extend(blob);
                }
                let result = u32::from(lies.refuses == Some(command));
                let answer = match command {
                    1 => [0, 0xffff & !lies.lacks].map(u32::to_be_bytes).concat(),
                    17 => {
                        let size = lies.buffer_bytes.unwrap_or(3968);
                        [result, size, 256, 4096].map(u32::to_be_bytes).concat()
                    }
                    12 => {
                        let len = lies.blob_bytes.unwrap_or(u32::from(body[7]) * 3);
                        let mut answer = [result, 0, len, len].map(u32::to_be_bytes).concat();
                        answer.resize(answer.len() + len.min(100) as usize, body[7]);
                        answer
                    }
                    _ => result.to_be_bytes().to_vec(),
                };
                let _ = asked_sender.send((command, body));
                if lies.is_silent_at == Some(command) {
                    continue;
                }
                if lies.hesitates_at == Some(command) {
                    std::thread::sleep(Duration::from_millis(300));
                }
                if control.write_all(&answer).is_err() {
                    return;
                }
            }
        });
        Self { folder, asked, data }
    }

    fn connect(&self) -> Result<Tpm, TpmError> {
        Tpm::connect(
            &self.folder.path().join("socket"),
            GPA,
            Box::new(|_| ()),
            ANSWER_WITHIN,
            &|| false,
        )
    }

    fn asked(&self) -> Vec<u32> {
        self.asked.try_iter().map(|(command, _)| command).collect()
    }
}

#[test]
fn registers_say_where_the_buffer_is_and_that_it_is_a_crb() {
    let emulator = Scripted::start(Lies::default());
    let tpm = emulator.connect().unwrap();
    assert_eq!(read(&tpm, 0x30) & 0xf, 1);
    assert_eq!((read(&tpm, 0x58), read(&tpm, 0x64)), (3968, 3968));
    assert_eq!((read(&tpm, 0x5c), read(&tpm, 0x68)), (0xfed4_0080, 0xfed4_0080));
    assert_eq!(read(&tpm, 0x44), 2, "idle");
    write(&tpm, 0x40, 1);
    assert_eq!((read(&tpm, 0x44), read(&tpm, 0x40)), (0, 0));
    assert_eq!(read(&tpm, 0) & 2, 0);
    write(&tpm, 8, 1);
    assert_eq!((read(&tpm, 0) & 0x82, read(&tpm, 0xc)), (0x82, 1));
    write(&tpm, 8, 2);
    assert_eq!((read(&tpm, 0) & 2, read(&tpm, 0xc)), (0, 0));
    let mut wide = [0; 8];
    tpm.read(0x68, &mut wide);
    assert_eq!(u64::from_le_bytes(wide), GPA + BUFFER);
}

#[test]
fn a_command_goes_and_its_response_comes() {
    let emulator = Scripted::start(Lies::default());
    let tpm = emulator.connect().unwrap();
    tpm.power_on().unwrap();
    assert_eq!(emulator.asked(), [1, 16, 14, 17, 14, 2, 14, 2]);
    let mut data = emulator.data.recv().unwrap();
    start(&tpm, &RANDOM);
    let mut got = [0; 12];
    data.read_exact(&mut got).unwrap();
    assert_eq!(got, RANDOM);
    assert_eq!(read(&tpm, 0x4c), 1);
    // What is written meanwhile is lost, and so are another start and a cancel.
    write(&tpm, 0x48, 1);
    tpm.write(BUFFER + 100, &[9; 8]);
    write(&tpm, 0x4c, 1);
    // Piece by piece.
    for byte in [0x80, 0x01, 0, 0, 0, 11, 0, 0, 0, 0, 77] {
        data.write_all(&[byte]).unwrap();
    }
    assert_eq!(response(&tpm), (11, 0));
    let mut last = [0];
    tpm.read(BUFFER + 10, &mut last);
    assert_eq!(last, [77]);
    assert_eq!(read(&tpm, BUFFER + 100), 0);
}

#[test]
fn the_parts_of_a_state_are_told_apart() {
    let saved = Scripted::start(Lies::default()).connect().unwrap().save().unwrap();
    for (part, bytes) in
        [("permanent", vec![1; 3]), ("volatile", vec![2; 6]), ("save_state", vec![3; 9])]
    {
        assert_eq!(saved.data[part]["bytes"], serde_json::json!(bytes), "{part}");
    }
}

#[test]
fn a_stop_is_held_up_by_a_command_and_by_nothing_else() {
    let emulator = Scripted::start(Lies::default());
    let tpm = Arc::new(emulator.connect().unwrap());
    let mut data = emulator.data.recv().unwrap();
    let began = Instant::now();
    tpm.wait_until_idle(LONG, &|| false);
    start(&tpm, &RANDOM);
    data.read_exact(&mut [0; 12]).unwrap();
    tpm.wait_until_idle(LONG, &|| true);
    tpm.wait_until_idle(Duration::from_millis(100), &|| false);
    assert!(began.elapsed() < LONG / 4);
    assert!(began.elapsed() >= Duration::from_millis(100));
    let own = Arc::clone(&tpm);
    let waiting = std::thread::spawn(move || {
        own.wait_until_idle(LONG, &|| false);
        read(&own, 0x4c)
    });
    data.write_all(&[0x80, 0x01, 0, 0, 0, 10, 0, 0, 0, 0]).unwrap();
    assert_eq!(waiting.join().unwrap(), 0);
    assert!(began.elapsed() < LONG / 4);
}

#[test]
fn a_queue_of_connections_that_is_full_is_waited_for_only_so_long() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("socket");
    let listener =
        socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::STREAM, None).unwrap();
    listener.bind(&socket2::SockAddr::unix(&path).unwrap()).unwrap();
    listener.listen(0).unwrap();
    let _in_the_queue = UnixStream::connect(&path).unwrap();
    let began = Instant::now();
    let connected = Tpm::connect(&path, GPA, Box::new(|_| ()), ANSWER_WITHIN, &|| false);
    assert!(matches!(connected, Err(TpmError::Emulator { .. })));
    assert!(began.elapsed() < LONG / 2);
}

#[test]
fn the_end_of_a_machine_is_no_loss() {
    let emulator = Scripted::start(Lies::default());
    let (lost, is_lost) = channel();
    let socket = emulator.folder.path().join("socket");
    let on_lost = Box::new(move |why: &str| lost.send(why.to_owned()).unwrap());
    let tpm = Tpm::connect(&socket, GPA, on_lost, ANSWER_WITHIN, &|| false).unwrap();
    let mut data = emulator.data.recv().unwrap();
    start(&tpm, &RANDOM);
    data.read_exact(&mut [0; 12]).unwrap();
    // The thread waits for the response, and finds its connection cut.
    drop(tpm);
    assert_eq!(is_lost.recv().ok(), None);
}

#[test]
fn a_late_answer_is_never_taken_for_another() {
    let emulator = Scripted::start(Lies { is_silent_at: Some(12), ..Lies::default() });
    let tpm = emulator.connect().unwrap();
    let error = error_text::chain(&tpm.save().unwrap_err());
    assert!(error.contains("'get state'"), "{error}");
    emulator.asked();
    let error = error_text::chain(&tpm.save().unwrap_err());
    assert!(error.contains("earlier answer"), "{error}");
    assert!(emulator.asked().is_empty());
}

#[test]
fn signals_do_not_cut_an_answer() {
    extern "C" fn nothing(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}
    let number = SIGRTMIN();
    register_signal_handler(number, nothing).unwrap();
    let emulator = Scripted::start(Lies { hesitates_at: Some(12), ..Lies::default() });
    let tpm = emulator.connect().unwrap();
    emulator.asked();
    let saving = std::thread::spawn(move || tpm.save());
    assert_eq!(emulator.asked.recv_timeout(LONG).unwrap().0, 12);
    while !saving.is_finished() {
        saving.kill(number).unwrap();
        std::thread::sleep(Duration::from_millis(5));
    }
    saving.join().unwrap().unwrap();
}

#[test]
fn a_save_waits_for_the_command_and_not_for_ever() {
    let emulator = Scripted::start(Lies::default());
    let tpm = Arc::new(emulator.connect().unwrap());
    let mut data = emulator.data.recv().unwrap();
    start(&tpm, &RANDOM);
    data.read_exact(&mut [0; 12]).unwrap();
    assert!(matches!(tpm.save(), Err(TpmError::Busy)));
    let own = Arc::clone(&tpm);
    let saving = std::thread::spawn(move || own.save());
    data.write_all(&[0x80, 0x01, 0, 0, 0, 10, 0, 0, 0, 0]).unwrap();
    let saved = saving.join().unwrap().unwrap();
    assert_eq!(saved.data["registers"]["buffer"].as_array().unwrap().len(), 12);
    // One that ends while it is waited for is lost, and not saved.
    start(&tpm, &RANDOM);
    let own = Arc::clone(&tpm);
    let saving = std::thread::spawn(move || own.save());
    drop(data);
    assert!(matches!(saving.join().unwrap(), Err(TpmError::Lost { .. })));
}

#[test]
fn a_start_that_is_cancelled_does_not_wait_for_the_emulator() {
    let emulator = Scripted::start(Lies { is_silent_at: Some(1), ..Lies::default() });
    let began = Instant::now();
    let is_cancelled = || began.elapsed() > Duration::from_millis(200);
    let socket = emulator.folder.path().join("socket");
    assert!(Tpm::connect(&socket, GPA, Box::new(|_| ()), LONG, &is_cancelled).is_err());
    assert!(began.elapsed() < LONG / 4);
}

#[test]
fn impossible_commands_fail_without_reaching_the_emulator() {
    let emulator = Scripted::start(Lies::default());
    let tpm = emulator.connect().unwrap();
    let data = emulator.data.recv().unwrap();
    data.set_nonblocking(true).unwrap();
    for length in [0_u32, 9, 3969, u32::MAX] {
        let mut command = RANDOM;
        command[2..6].copy_from_slice(&length.to_be_bytes());
        start(&tpm, &command);
        assert_eq!(response(&tpm), (10, 0x101), "{length}");
    }
    assert!((&data).read(&mut [0]).is_err());
}

#[test]
fn a_lost_emulator_fails_commands_and_is_reported_once() {
    let emulator = Scripted::start(Lies::default());
    let (lost, is_lost) = channel();
    let socket = emulator.folder.path().join("socket");
    let on_lost = Box::new(move |why: &str| lost.send(why.to_owned()).unwrap());
    let tpm = Tpm::connect(&socket, GPA, on_lost, ANSWER_WITHIN, &|| false).unwrap();
    let mut data = emulator.data.recv().unwrap();
    start(&tpm, &RANDOM);
    data.read_exact(&mut [0; 12]).unwrap();
    // Longer than its buffer.
    data.write_all(&[0x80, 0x01, 0, 0, 0x10, 0, 0, 0, 0, 0]).unwrap();
    assert_eq!(response(&tpm), (10, 0x101));
    assert!(is_lost.recv_timeout(LONG).unwrap().contains("length"));
    assert_eq!(read(&tpm, 0x44) & 1, 1);
    start(&tpm, &RANDOM);
    assert_eq!(response(&tpm), (10, 0x101));
    assert!(matches!(tpm.save(), Err(TpmError::Lost { .. })));
    drop(tpm);
    assert!(is_lost.recv().is_err());
}

#[test]
fn the_end_does_not_wait_for_half_a_response() {
    let emulator = Scripted::start(Lies::default());
    let tpm = emulator.connect().unwrap();
    let mut data = emulator.data.recv().unwrap();
    start(&tpm, &RANDOM);
    data.read_exact(&mut [0; 12]).unwrap();
    data.write_all(&[0x80]).unwrap();
    let began = Instant::now();
    drop(tpm);
    assert!(began.elapsed() < LONG / 4);
}

#[test]
fn emulators_that_cannot_do_it_are_refused_by_name() {
    let refused = |lies| match Scripted::start(lies).connect() {
        Err(error) => error_text::chain(&error),
        Ok(_) => panic!("taken"),
    };
    let text = refused(Lies { lacks: 1 << 13, ..Lies::default() });
    assert!(text.contains("setting the size of its buffer"), "{text}");
    let text = refused(Lies { buffer_bytes: Some(2048), ..Lies::default() });
    assert!(text.contains("2048") && text.contains("3968"), "{text}");
    let text = refused(Lies { refuses: Some(14), ..Lies::default() });
    assert!(text.contains("'stop'"), "{text}");
    let nowhere =
        Tpm::connect(Path::new("/dev/null/socket"), GPA, Box::new(|_| ()), ANSWER_WITHIN, &|| {
            false
        });
    assert!(matches!(nowhere, Err(TpmError::Emulator { .. })));
}

#[test]
fn states_are_limited() {
    let emulator = Scripted::start(Lies { blob_bytes: Some(u32::MAX), ..Lies::default() });
    let error = emulator.connect().unwrap().save().unwrap_err();
    assert!(error_text::chain(&error).contains("4294967295"));
    let emulator = Scripted::start(Lies::default());
    let tpm = emulator.connect().unwrap();
    let saved = tpm.save().unwrap();
    let mut long = saved.clone();
    long.data["registers"]["buffer"] = vec![0; 3969].into();
    assert!(matches!(tpm.restore(&long), Err(TpmError::State(_))));
    let mut unknown = saved.clone();
    unknown.data["more"] = 1.into();
    assert!(matches!(tpm.restore(&unknown), Err(TpmError::State(_))));
    emulator.asked();
    tpm.restore(&saved).unwrap();
    let asked: Vec<_> = emulator.asked.try_iter().collect();
    let commands: Vec<_> = asked.iter().map(|(command, _)| *command).collect();
    assert_eq!(commands, [14, 13, 13, 13, 2]);
    assert_eq!(asked[2].1[12..], [2; 6]);
    assert_eq!(asked[4].1, [0, 0, 0, 1]);
}

proptest! {
    #[test]
    fn no_access_is_harmful(
        accesses in prop::collection::vec((0_u64..0x1100, any::<u64>(), 0_usize..9, any::<bool>()), 1..200),
    ) {
        let mut crb = crb::Crb::new(GPA);
        for (offset, value, len, is_write) in accesses {
            let mut data = value.to_le_bytes();
            if is_write {
                let was_running = crb.is_running();
                if let Some(command) = crb.write(offset, &data[..len]) {
                    prop_assert!(!was_running && (10..=3968).contains(&command.len()));
                    if value & 1 << 40 == 0 {
                        crb.finish(&command);
                    }
                }
            } else {
                crb.read(offset, &mut data[..len]);
            }
            let saved = crb.save();
            let mut again = crb::Crb::new(GPA);
            again.restore(&saved);
            prop_assert_eq!(again.save(), saved);
        }
    }
}

/// A real emulator with its state in a directory.
struct Swtpm {
    folder: TempDir,
    process: Child,
}

impl Swtpm {
    fn start() -> Option<Self> {
        let folder = TempDir::new().unwrap();
        let path = folder.path().display();
        let process = Command::new("swtpm")
            .args(["socket", "--tpm2", "--tpmstate", &format!("dir={path}")])
            .args(["--ctrl", &format!("type=unixio,path={path}/socket")])
            .stdin(Stdio::null())
            .spawn();
        match process {
            Ok(process) => Some(Self { folder, process }),
            Err(error) => {
                test_skip::skip!("swtpm: {error}");
                None
            }
        }
    }

    fn connect(&self) -> Tpm {
        Tpm::connect(
            &self.folder.path().join("socket"),
            GPA,
            Box::new(|_| ()),
            ANSWER_WITHIN,
            &|| false,
        )
        .unwrap()
    }
}

impl Drop for Swtpm {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// `TPM2_CC_PCR_Read` of register 16 in the bank of SHA-256: the response with its value at its end.
fn pcr(tpm: &Tpm) -> Vec<u8> {
    let command = [0x80, 0x01, 0, 0, 0, 20, 0, 0, 0x01, 0x7e, 0, 0, 0, 1, 0, 0x0b, 3, 0, 0, 1];
    start(tpm, &command);
    let (len, code) = response(tpm);
    assert_eq!(code, 0);
    let mut value = vec![0; 32];
    for (at, byte) in (BUFFER + u64::from(len) - 32..).zip(&mut value) {
        tpm.read(at, std::slice::from_mut(byte));
    }
    value
}

#[test]
fn swtpm_keeps_what_it_measured_where_it_moves() {
    let (Some(source), Some(destination)) = (Swtpm::start(), Swtpm::start()) else { return };
    let tpm = source.connect();
    tpm.power_on().unwrap();
    start(&tpm, &STARTUP);
    assert_eq!(response(&tpm).1, 0);
    let zero = pcr(&tpm);
    assert_eq!(zero, [0; 32]);
    // `TPM2_CC_PCR_Extend` of register 16, with an empty password.
    let mut extend = vec![0x80, 0x02, 0, 0, 0, 65, 0, 0, 0x01, 0x82, 0, 0, 0, 16];
    extend.extend([0, 0, 0, 9, 0x40, 0, 0, 9, 0, 0, 0, 0, 0]);
    extend.extend([0, 0, 0, 1, 0, 0x0b]);
    extend.extend([7; 32]);
    start(&tpm, &extend);
    assert_eq!(response(&tpm).1, 0);
    let measured = pcr(&tpm);
    assert_ne!(measured, zero);

    let saved = tpm.save().unwrap();
    let there = destination.connect();
    there.restore(&saved).unwrap();
    // Neither a start nor `TPM2_Startup`: it is the same TPM.
    assert_eq!(pcr(&there), measured);
    // Saving does not end anything: the guest may stay where it is.
    assert_eq!(pcr(&tpm), measured);
    // A reboot is a new machine on the same emulator.
    drop(there);
    let rebooted = destination.connect();
    rebooted.power_on().unwrap();
    start(&rebooted, &STARTUP);
    assert_eq!(response(&rebooted).1, 0);
    assert_eq!(pcr(&rebooted), zero);
}
