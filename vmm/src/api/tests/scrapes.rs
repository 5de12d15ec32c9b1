// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Scrapes: on the socket of metrics, by the API, and of clients that mean no good.

use std::os::fd::AsFd as _;

use super::super::rights::send;
use super::super::server::Front;
use super::*;

/// A server of metrics with the VMM of the other tests behind it, or with one that takes no requests.
struct Scraped {
    dir: tempfile::TempDir,
    server: ApiServer,
    /// Keeps the requests of a VMM thread that is busy.
    _queue: Option<ApiQueue>,
}

impl Scraped {
    fn new(limits: Limits, is_busy: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let listener = ApiListener::bind(ApiSocket::Path(dir.path().join("m"))).unwrap();
        let (handle, queue) = channel().unwrap();
        let queue = if is_busy {
            Some(queue)
        } else {
            let (hold, _held) = std::sync::mpsc::channel();
            std::thread::spawn(move || vmm(&queue, &hold));
            None
        };
        let server = ApiServer::start_with(Front::Metrics, listener, handle, limits).unwrap();
        Self { dir, server, _queue: queue }
    }

    fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(self.dir.path().join("m")).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream
    }

    fn raw(&self, text: &str) -> String {
        let mut stream = self.connect();
        let _ = stream.write_all(text.as_bytes());
        read_to_end(&mut stream)
    }

    /// The answer to a request without a body.
    fn ask(&self, method: &str, path: &str, headers: &str) -> String {
        self.raw(&format!(
            "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}\r\n"
        ))
    }

    #[track_caller]
    fn scrape(&self) -> String {
        let text = self.ask("GET", "/metrics", "");
        assert!(text.starts_with("HTTP/1.1 200 ") && text.ends_with("\n# EOF\n"), "{text}");
        text
    }
}

#[test]
fn a_scrape_is_text_in_the_format_that_the_client_accepts() {
    let scraped = Scraped::new(Limits::default(), false);
    let text = scraped.scrape();
    let media = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    assert!(text.contains(&format!("\r\nContent-Type: {media}\r\n")), "{text}");
    assert!(text.contains("\ngodwit_scrape_complete 1\n"), "{text}");
    assert!(text.contains("\ngodwit_vm_state{state=\"none\"} 1\n"), "{text}");
    let old = scraped.ask("GET", "/metrics", "Accept: text/plain\r\n");
    assert!(old.contains("\r\nContent-Type: text/plain; version=0.0.4;"), "{old}");
    assert!(old.contains("\ngodwit_scrape_complete 1\n") && !old.contains("# EOF"), "{old}");
    let weighed = "Accept: text/plain;q=0.3\r\nAccept: application/openmetrics-text;q=0.5\r\n";
    assert!(scraped.ask("GET", "/metrics", weighed).contains("# EOF"), "lines are one list");
}

#[test]
fn the_socket_of_metrics_has_nothing_else() {
    let scraped = Scraped::new(Limits::default(), false);
    for path in ["/", "/metrics/", "/api/v1/vmm.ping", "/api/v1/vm.info", "/api/v1/vm.metrics"] {
        let text = scraped.ask("GET", path, "");
        assert!(text.starts_with("HTTP/1.1 404 "), "{path}: {text}");
    }
    let ends = scraped.ask("PUT", "/api/v1/vmm.shutdown", "");
    assert!(ends.starts_with("HTTP/1.1 404 "), "{ends}");
    for method in ["PUT", "POST", "DELETE", "HEAD"] {
        let text = scraped.ask(method, "/metrics", "");
        assert!(text.starts_with("HTTP/1.1 405 ") && text.contains("\r\nAllow: GET\r\n"), "{text}");
    }
    let mut stream = scraped.connect();
    let request = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n";
    send(&stream, request, &[std::io::stdin().as_fd()]).unwrap();
    let text = read_to_end(&mut stream);
    assert!(text.starts_with("HTTP/1.1 400 "), "descriptors are for no one here: {text}");
    scraped.scrape();
}

#[test]
fn a_scrape_does_not_wait_for_a_busy_vmm_thread() {
    let scraped = Scraped::new(Limits::default(), true);
    let begun = Instant::now();
    let text = scraped.scrape();
    assert!(begun.elapsed() >= Duration::from_millis(900), "it had its time");
    assert!(text.contains("\ngodwit_scrape_complete 0\n"), "{text}");
    assert!(text.contains("\ngodwit_build_info{") && !text.contains("godwit_vm_state"), "{text}");
}

#[test]
fn scrapers_that_only_hold_connections_keep_no_other_out() {
    let scraped = Scraped::new(Limits { connections: 3, ..Limits::default() }, false);
    let mut held: Vec<_> = (0..12).map(|_| scraped.connect()).collect();
    for (number, stream) in held.iter_mut().enumerate() {
        // Some have begun to ask, and some never read their answer.
        let request = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n";
        let sent = [0, 10, request.len()][number % 3];
        // The server may have hung up already.
        let _ = stream.write_all(&request[..sent]);
        scraped.scrape();
    }
}

#[test]
fn rubbish_gets_no_metrics() {
    let scraped = Scraped::new(Limits::default(), false);
    for text in [
        "\0\u{1}\u{2}\r\n\r\n",
        "GET\r\n\r\n",
        "GET /metrics\r\n\r\n",
        "GET /metrics HTTP/9.9\r\n\r\n",
        "GET /metrics HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        "GET /metrics HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n",
        "GET /metrics HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ] {
        let answer = scraped.raw(text);
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 4"), "{text:?}: {answer}");
        scraped.scrape();
    }
    let many = format!("GET /metrics HTTP/1.1\r\n{}\r\n", "X: y\r\n".repeat(500));
    assert!(scraped.raw(&many).starts_with("HTTP/1.1 431 "));
    let odd = scraped.ask("GET", "/metrics", "Accept: \u{e9}\r\nAccept: ;;,q=,text/plain;q=z\r\n");
    assert!(odd.starts_with("HTTP/1.1 200 ") && odd.ends_with("# EOF\n"), "{odd}");
}

#[test]
fn the_socket_is_removed_with_the_server() {
    let Scraped { dir, server, _queue } = Scraped::new(Limits::default(), false);
    assert!(dir.path().join("m").exists());
    server.stop();
    assert!(!dir.path().join("m").exists());
}

#[test]
fn the_api_gives_the_same_and_counts_its_requests() {
    let fixture = Fixture::new();
    let client = fixture.client();
    let scrape = || client.ask(endpoints::Method::Get, "vm.metrics", None).unwrap().unwrap();
    fixture.ping();
    let _ = client.ask(endpoints::Method::Put, "vm.boot", None).unwrap_err();
    let _ = client.ask(endpoints::Method::Put, "vm.reboot", None).unwrap_err();
    let _ = client.ask(endpoints::Method::Get, "no.such", None).unwrap_err();
    scrape();
    let text = scrape();
    assert!(text.contains("\ngodwit_vm_state{state=\"none\"} 1\n") && text.ends_with("# EOF\n"));
    for (endpoint, outcome, count) in [
        ("vmm.ping", "success", 1),
        ("vm.boot", "refused", 1),
        ("vm.reboot", "failed", 1),
        ("unknown", "refused", 1),
        ("vm.metrics", "success", 1),
    ] {
        let line = format!(
            "godwit_api_requests_total{{endpoint=\"{endpoint}\",outcome=\"{outcome}\"}} {count}"
        );
        assert!(text.lines().any(|it| it == line), "no {line} in\n{text}");
    }
}
