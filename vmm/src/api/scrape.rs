// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Scrapes: metrics as the answer to a request, on a socket of their own and as an endpoint of the API.
//!
//! Owns how long the VMM thread is waited for, and what the socket of metrics takes: `GET /metrics`, and nothing that
//! changes anything. It must never wait for longer than that, whatever the VMM does.

use std::future::{Future as _, poll_fn};
use std::pin::pin;
use std::task::Poll;
use std::time::{Duration, Instant};

use http_body_util::Full;
use hyper::body::Bytes;
use hyper::header::{ACCEPT, ALLOW, CONTENT_TYPE, HeaderMap, HeaderValue};
use hyper::{Method, Response, StatusCode};

use super::connection::{HttpResponse, Peer, refuse};
use super::endpoints::METRICS;
use super::request::{ApiHandle, ApiReply, VmmRequest};
use super::server::Limits;
use super::types::{BUILD_VERSION, COMPATIBLE_VERSION};
use crate::metrics::{Format, Versions, VmReading};

/// Path of metrics on their own socket, as monitoring systems expect it.
const PATH: &str = "/metrics";

/// Time that the VMM thread has to answer. It takes less than a millisecond, unless it waits for a thread that ends a
/// machine; monitoring systems wait for ten seconds, and a client of the API for two.
const SCRAPE_TIME: Duration = Duration::from_secs(1);

/// Most connections to the socket of metrics: a few monitoring systems, and a person.
const SCRAPERS_MAX: usize = 16;

/// Limits of the socket of metrics.
pub fn limits() -> Limits {
    Limits { connections: SCRAPERS_MAX, ..Limits::default() }
}

/// Versions of this program.
const VERSIONS: Versions = Versions { own: BUILD_VERSION, compatible: COMPATIBLE_VERSION };

/// What the VMM thread says in time; also `None` if the client has left, or there is no VMM thread any more.
async fn ask(handle: &ApiHandle, client: &Peer) -> Option<Box<VmReading>> {
    let _busy = client.slot.begin_request();
    let asked = tokio::time::timeout(SCRAPE_TIME, handle.ask(METRICS, VmmRequest::Metrics));
    let (mut asked, mut gone) = (pin!(asked), pin!(client.hangup.wait()));
    let answer = poll_fn(|cx| match asked.as_mut().poll(cx) {
        Poll::Pending => gone.as_mut().poll(cx).map(|()| None),
        Poll::Ready(answer) => Poll::Ready(answer.ok().and_then(Result::ok)),
    });
    match answer.await {
        Some(ApiReply::Metrics(reading)) => Some(reading),
        _ => None,
    }
}

/// The answer to a scrape.
pub async fn answer(headers: &HeaderMap, handle: &ApiHandle, client: &Peer) -> HttpResponse {
    let begun = Instant::now();
    // Several lines of a header are one list.
    let accept = headers.get_all(ACCEPT).into_iter().filter_map(|value| value.to_str().ok());
    let format = Format::for_accept(Some(&accept.collect::<Vec<_>>().join(",")));
    let reading = ask(handle, client).await;
    let text = handle.hub().text(VERSIONS, reading.as_deref(), begun.elapsed(), format);
    let mut response = Response::new(Full::new(Bytes::from(text)));
    let content_type = HeaderValue::from_static(format.content_type());
    response.headers_mut().insert(CONTENT_TYPE, content_type);
    response
}

/// Why a request to the socket of metrics is refused, if it is.
pub fn refusal(method: &Method, path: &str) -> Option<HttpResponse> {
    if path != PATH {
        return Some(refuse(StatusCode::NOT_FOUND, &format!("there is only {PATH}")));
    }
    if method == Method::GET {
        return None;
    }
    let mut response = refuse(StatusCode::METHOD_NOT_ALLOWED, &format!("{PATH} takes GET"));
    response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET"));
    Some(response)
}
