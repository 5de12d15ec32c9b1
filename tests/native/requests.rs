// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Every request of the API, from two clients at once, in every state in which a VM can be met: each is
//! answered in time, and one that is refused leaves descriptors, threads and the configuration as they were.
//!
//! Here are the requests, and the states that last by themselves; those that last because a disk, a
//! migration or a guest does are in [`crate::states`].

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::harness::api::{Answer, Api};
use crate::harness::{Suite, Vmm, VmmBuilder, payload, process, wait_for};
use crate::lifecycle::config;

pub fn add(suite: &mut Suite) {
    suite.add("requests::all_of_the_description_are_asked", all_are_asked);
    for state in ["", "Created", "Running", "Paused"] {
        let name = if state.is_empty() { "none".to_owned() } else { state.to_lowercase() };
        suite.add(&format!("requests::in_pairs_{name}"), move || pairs(state));
    }
}

/// In which an answer has to come: the second that clients count on, and another one for a busy host.
pub const PROMPT: Duration = Duration::from_secs(2);

/// A request.
#[derive(Clone, Debug)]
pub struct Request {
    pub method: &'static str,
    pub name: &'static str,
    pub body: String,
}

/// All requests of the API, with bodies, but those that end the process.
pub fn requests() -> Vec<Request> {
    let get = |name| Request { method: "GET", name, body: String::new() };
    let put = |name, body: &str| Request { method: "PUT", name, body: body.to_owned() };
    vec![
        get("vmm.ping"),
        get("vm.info"),
        get("vm.counters"),
        get("vm.metrics"),
        get("vm.migration-progress"),
        get("vm.migration-report"),
        put("vm.create", &config(64)),
        put("vm.boot", ""),
        put("vm.pause", ""),
        put("vm.resume", ""),
        put("vm.reboot", ""),
        put("vm.shutdown", ""),
        put("vm.delete", ""),
        put("vm.power-button", ""),
        put("vm.nmi", ""),
        put("vm.snapshot-cancel", ""),
        put("vm.resize", r#"{"desired_balloon":1048576}"#),
        put("vm.resize-disk", r#"{"id":"nothing","desired_size":512}"#),
        put("vm.resize-zone", r#"{"id":"mem0","desired_ram":1}"#),
        put("vm.add-disk", r#"{"path":"/nonexistent"}"#),
        put("vm.add-net", r#"{"tap":"no/tap"}"#),
        put("vm.add-device", r#"{"path":"/nonexistent"}"#),
        put(
            "vm.add-fs",
            r#"{"tag":"t","socket":"/dev/null/socket","num_queues":1,"queue_size":64}"#,
        ),
        put(
            "vm.add-generic-vhost-user",
            r#"{"socket":"/dev/null/socket","device_type":26,"queue_sizes":[64]}"#,
        ),
        put("vm.add-user-device", r#"{"socket":"/dev/null/socket"}"#),
        put("vm.add-vdpa", r#"{"path":"/nonexistent","num_queues":1}"#),
        put("vm.add-vsock", r#"{"cid":3,"socket":"/nonexistent/vsock"}"#),
        put("vm.add-pmem", r#"{"file":"/nonexistent"}"#),
        put("vm.remove-device", r#"{"id":"nothing"}"#),
        put("vm.snapshot", r#"{"destination_url":"file:///nonexistent"}"#),
        put("vm.coredump", r#"{"destination_url":"file:///dev/null"}"#),
        put("vm.restore", r#"{"source_url":"file:///nonexistent"}"#),
        put("vm.send-migration", r#"{"destination_url":"tcp:127.0.0.1:1"}"#),
        put("vm.receive-migration", r#"{"receiver_url":"nowhere"}"#),
        put("vm.migrate-check", r#"{"destination_url":"tcp:127.0.0.1:1"}"#),
        put("vm.migration-cancel", ""),
        put("vm.migration-start-postcopy", ""),
        put("vm.migration-recover", "{}"),
    ]
}

/// Those, without some.
pub fn requests_but(names: &[&str]) -> Vec<Request> {
    requests().into_iter().filter(|request| !names.contains(&request.name)).collect()
}

fn all_are_asked() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/openapi.json");
    let text = std::fs::read_to_string(path).expect("the description");
    let description: Value = serde_json::from_str(&text).expect("JSON");
    let mut described: Vec<&str> =
        description["paths"].as_object().expect("paths").keys().map(String::as_str).collect();
    // Ends the process, and is asked in each state for that.
    described.retain(|path| !path.ends_with("vmm.shutdown"));
    let asked = requests();
    for path in &described {
        assert!(asked.iter().any(|request| path.ends_with(request.name)), "{path} is not asked");
    }
    assert_eq!(described.len(), asked.len());
}

/// Sends one, which has to be answered in time, whatever the answer is.
#[track_caller]
pub fn prompt(api: &Api, request: &Request) -> Answer {
    let Request { method, name, body } = request;
    let began = Instant::now();
    let body = (!body.is_empty()).then_some(body.as_str());
    let answer = api.request(method, name, body);
    let answer = answer.unwrap_or_else(|error| panic!("{name}: {error}"));
    assert!(began.elapsed() < PROMPT, "{name} took {:?}: {answer:?}", began.elapsed());
    answer
}

/// PUT of a name alone, likewise.
#[track_caller]
pub fn prompt_put(api: &Api, name: &'static str) -> Answer {
    prompt(api, &Request { method: "PUT", name, body: String::new() })
}

/// Two clients ask for all of these, each at any time while the other does: every two meet.
#[track_caller]
pub fn wave(api: &Api, requests: &[Request]) -> Vec<(&'static str, Answer)> {
    std::thread::scope(|scope| {
        let client = || requests.iter().map(|request| (request.name, request));
        let asked: Vec<_> = client()
            .chain(client())
            .map(|(name, request)| (name, scope.spawn(move || prompt(api, request))))
            .collect();
        let answer = |(name, thread): (_, std::thread::ScopedJoinHandle<'_, Answer>)| {
            (name, thread.join().expect("an answer in time"))
        };
        asked.into_iter().map(answer).collect()
    })
}

/// What a refused request must leave as it was.
#[derive(Debug, PartialEq)]
pub struct Held {
    descriptors: Vec<String>,
    threads: Vec<String>,
    /// Status, state, operation in progress and configuration; not what changes by itself.
    vm: [Value; 4],
}

impl Held {
    pub fn by(vmm: &Vmm) -> Self {
        let info = vmm.api().get("vm.info");
        let json = if info.status == 200 { info.json() } else { Value::Null };
        let field = |name: &str| json.get(name).cloned().unwrap_or_default();
        let look = || (process::descriptors(vmm.pid()), process::thread_names(vmm.pid()));
        // Connections are closed a moment after their last answer, that of the last request too, and a new
        // thread names itself when it gets a processor: what is noted with one of these would never be there
        // again.
        let mut last = look();
        for _ in 0..400 {
            std::thread::sleep(Duration::from_millis(5));
            let before = std::mem::replace(&mut last, look());
            let nameless = last.1.iter().filter(|name| *name == "cloud-hyperviso").count();
            if before == last && nameless <= 1 {
                break;
            }
        }
        let (descriptors, threads) = last;
        Self {
            descriptors,
            threads,
            vm: [json!(info.status), field("state"), field("doing"), field("config")],
        }
    }

    /// Without those of its connections that a later look did not find, if they are no more than two clients have: those
    /// of an earlier request were about to be closed.
    fn but_for_connections_beyond(&self, later: &Self) -> Self {
        let is_connection = |name: &&String| name.starts_with("socket:");
        let own = self.descriptors.iter().filter(is_connection).count();
        let left =
            later.descriptors.iter().filter(is_connection).count().max(own.saturating_sub(2));
        let mut connections = 0;
        let mut descriptors = self.descriptors.clone();
        descriptors.retain(|name| {
            connections += usize::from(is_connection(&name));
            !is_connection(&name) || connections <= left
        });
        Self { descriptors, threads: self.threads.clone(), vm: self.vm.clone() }
    }

    /// It is again what it was, as soon as connections and threads have ended that are on their way out.
    #[track_caller]
    pub fn assert_still(&self, vmm: &Vmm, after: &str) {
        let began = Instant::now();
        loop {
            let now = Self::by(vmm);
            if now == self.but_for_connections_beyond(&now) {
                return;
            }
            assert!(
                began.elapsed() < crate::harness::PATIENCE,
                "after {after}: {now:#?}\ninstead of {self:#?}"
            );
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Every pair of requests at once, in a VM that is there, runs or is paused: all are answered, and the VMM
/// is in one state afterwards from which it continues.
fn pairs(state: &str) {
    let vmm = VmmBuilder::new(&["--no-shutdown"]).start();
    let api = vmm.api();
    let mut body: Value = serde_json::from_str(&config(64)).expect("JSON");
    body["payload"] = json!({ "kernel": payload::halting(vmm.path("").as_path()) });
    body["balloon"] = json!({ "size": 0 });
    let body = body.to_string();
    let requests = requests();
    bring(&api, &body, "Running");
    bring(&api, &body, "");
    let before = process::descriptors(vmm.pid()).len();
    for (at, first) in requests.iter().enumerate() {
        for second in &requests[at..] {
            if api.state() != state {
                bring(&api, &body, state);
            }
            let held = Held::by(&vmm);
            let answers = std::thread::scope(|scope| {
                let other = scope.spawn(|| prompt(&api, second));
                [prompt(&api, first), other.join().expect("an answer")]
            });
            // A migration that was begun fails, as it has no destination.
            wait_for("what was begun to end", || {
                let info = api.get("vm.info");
                (info.status != 200 || info.json().get("doing").is_none()).then_some(())
            });
            let changes_nothing = |request: &Request, answer: &Answer| {
                answer.status >= 400 || request.method == "GET"
            };
            if changes_nothing(first, &answers[0]) && changes_nothing(second, &answers[1]) {
                held.assert_still(&vmm, &format!("{} and {}", first.name, second.name));
            }
            // This guest has no handler for it, and resets; that may be long after the answer.
            let is_nmi = |(request, answer): (&Request, &Answer)| {
                request.name == "vm.nmi" && answer.status < 300
            };
            if [first, second].into_iter().zip(&answers).any(is_nmi) {
                bring(&api, &body, state);
            }
        }
    }
    bring(&api, &body, "");
    wait_for("the descriptors", || (process::descriptors(vmm.pid()).len() <= before).then_some(()));
    vmm.shut_down();
}

/// From any state into this one.
fn bring(api: &Api, body: &str, state: &str) {
    // It is refused while the VM is being ended for a reset, say.
    wait_for("the end of the VM", || {
        api.put("vm.delete", "");
        (api.get("vm.info").status == 404).then_some(())
    });
    let steps: &[(&str, &str)] = match state {
        "Created" => &[("vm.create", body)],
        "Running" => &[("vm.create", body), ("vm.boot", "")],
        "Paused" => &[("vm.create", body), ("vm.boot", ""), ("vm.pause", "")],
        _ => &[],
    };
    for (name, body) in steps {
        api.put(name, body).ok();
    }
    assert_eq!(api.state(), state);
}
