// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! One HTTP request: from its head and body to the VMM and back to a response.
//!
//! Owns the limits of a body and the form of answers: a status line without a reason phrase, as
//! cloud-hypervisor's own client reads everything after the version as a number, and errors as a
//! JSON list of sentences, outermost first. It must never block the thread.

use std::cell::RefCell;
use std::convert::Infallible;
use std::future::{Future as _, poll_fn};
use std::os::fd::OwnedFd;
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::Instant;

use http_body_util::{BodyExt as _, Full, LengthLimitError, Limited};
use hyper::body::{Body as _, Bytes, Incoming};
use hyper::ext::ReasonPhrase;
use hyper::header::{ALLOW, CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, HeaderMap, HeaderValue};
use hyper::{Request, Response, StatusCode};

use super::connection_slots::ConnectionSlot;
use super::encoding;
use super::endpoints::{self, Endpoint, Route};
use super::hangup::Hangup;
use super::request::{ApiError, ApiErrorKind, ApiHandle, ApiReply, VmmRequest};
use super::rights::{self, ReceivedFds};
use super::scrape;
use super::server::{Front, Limits};
use super::watchers::{Watching, is_the_end};
use crate::json_text;

/// A response with its whole body.
pub type HttpResponse = Response<Full<Bytes>>;

/// The client of a request.
pub struct Peer {
    /// Its slot.
    pub slot: Rc<ConnectionSlot>,
    /// Descriptors that the client has sent.
    pub received: ReceivedFds,
    /// Detects that the client has closed the connection.
    pub hangup: Rc<Hangup>,
    /// Set while it follows a migration on this connection.
    pub watching: Rc<RefCell<Option<Watching>>>,
}

impl Peer {
    /// Counts the client that asks for the progress of a migration until it closes its connection, or is answered with the
    /// end.
    fn begins_to_watch(&self, handle: &ApiHandle) {
        self.watching.borrow_mut().get_or_insert_with(|| handle.watchers().begin());
    }

    fn was_answered(&self, reply: &ApiReply) {
        if matches!(reply, ApiReply::Progress(document) if is_the_end(document)) {
            self.watching.take();
        }
    }
}

/// Answers one request, and counts it if it is one to the API.
pub async fn serve(
    request: Request<Incoming>,
    front: Front,
    handle: ApiHandle,
    limits: Limits,
    client: Peer,
) -> Result<HttpResponse, Infallible> {
    let mut response = match front {
        Front::Api => {
            let (begun, name) = (Instant::now(), endpoints::name_of(request.uri().path()));
            let response = answer(request, &handle, limits, client).await;
            handle.hub().requests().note(name, response.status().as_u16(), begun.elapsed());
            response
        }
        Front::Metrics => answer_scrape(request, &handle, limits, client).await,
    };
    response.extensions_mut().insert(ReasonPhrase::from_static(b""));
    Ok(response)
}

/// Finds the endpoint, reads the whole body and carries the request out. The body is read before a
/// refusal, too: a client that is still sending it would see a broken pipe in place of the reason.
async fn answer(
    request: Request<Incoming>,
    handle: &ApiHandle,
    limits: Limits,
    client: Peer,
) -> HttpResponse {
    let (head, body) = request.into_parts();
    let body = match read_body(body, limits).await {
        Ok(body) => body,
        Err(refusal) => return refusal,
    };
    // Taken for each request, so that the descriptors of one request cannot reach the next.
    let fds = match client.received.take() {
        Ok(fds) => fds,
        Err(error) => return closing(refuse(StatusCode::BAD_REQUEST, &error.to_string())),
    };
    let with_fds = !fds.is_empty();
    let endpoint = match endpoints::route(head.method.as_str(), head.uri.path()) {
        Route::Found(endpoint) => endpoint,
        Route::WrongMethod(endpoint) => {
            let mut response = refuse(
                StatusCode::METHOD_NOT_ALLOWED,
                &format!("{} takes {}", endpoint.path, endpoint.method.as_str()),
            );
            response
                .headers_mut()
                .insert(ALLOW, HeaderValue::from_static(endpoint.method.as_str()));
            return response;
        }
        Route::Unknown => {
            let message = format!("there is no endpoint '{}'", head.uri.path());
            return refuse(StatusCode::NOT_FOUND, &message);
        }
    };
    let request = match understand(endpoint, &body, fds) {
        Ok(request) => request,
        // They may belong to a pipelined request, which must not run without them.
        Err(error) if with_fds => return closing(failure(&error)),
        Err(error) => return failure(&error),
    };
    carry_out(endpoint.path, request, &head.headers, handle, &client)
        .await
        .unwrap_or_else(|error| failure(&error))
}

/// Answers a request to the socket of metrics, which takes neither a body nor descriptors.
async fn answer_scrape(
    request: Request<Incoming>,
    handle: &ApiHandle,
    limits: Limits,
    client: Peer,
) -> HttpResponse {
    let (head, body) = request.into_parts();
    if let Err(refusal) = read_body(body, limits).await {
        return refusal;
    }
    match client.received.take() {
        Ok(fds) if fds.is_empty() => {}
        _ => return closing(refuse(StatusCode::BAD_REQUEST, "descriptors came with a scrape")),
    }
    match scrape::refusal(&head.method, head.uri.path()) {
        Some(refusal) => refusal,
        None => scrape::answer(&head.headers, handle, &client).await,
    }
}

fn understand(endpoint: &Endpoint, body: &[u8], fds: Vec<OwnedFd>) -> Result<VmmRequest, ApiError> {
    let mut request = (endpoint.decode)(body)?;
    rights::attach(endpoint.path, &mut request, fds)?;
    Ok(request)
}

async fn carry_out(
    name: &'static str,
    request: VmmRequest,
    headers: &HeaderMap,
    handle: &ApiHandle,
    client: &Peer,
) -> Result<HttpResponse, ApiError> {
    if matches!(request, VmmRequest::Metrics) {
        return Ok(scrape::answer(headers, handle, client).await);
    }
    let _busy = client.slot.begin_request();
    if matches!(request, VmmRequest::MigrationProgress) {
        client.begins_to_watch(handle);
    }
    let (mut asked, mut gone) = (pin!(handle.ask(name, request)), pin!(client.hangup.wait()));
    let reply = poll_fn(|cx| match asked.as_mut().poll(cx) {
        // The request is polled once before the hang-up counts: a request whose client has already left is
        // still carried out if it need not wait.
        Poll::Pending => gone.as_mut().poll(cx).map(|()| Err(client_is_gone())),
        answered @ Poll::Ready(_) => answered,
    })
    .await?;
    client.was_answered(&reply);
    Ok(match encoding::encode(&reply)? {
        None => empty(StatusCode::NO_CONTENT),
        Some(json) => with_json(StatusCode::OK, json),
    })
}

/// The error of a request whose client has hung up; it is never read.
fn client_is_gone() -> ApiError {
    ApiError::new(ApiErrorKind::Failed, "the client has closed the connection")
}

/// Reads a body within its limits of size and time.
async fn read_body(body: Incoming, limits: Limits) -> Result<Bytes, HttpResponse> {
    let too_large = || {
        let message = format!("the body exceeds {} bytes", limits.body_bytes);
        closing(refuse(StatusCode::PAYLOAD_TOO_LARGE, &message))
    };
    let limit = u64::try_from(limits.body_bytes).unwrap_or(u64::MAX);
    if body.size_hint().lower() > limit {
        return Err(too_large());
    }
    let collect = Limited::new(body, limits.body_bytes).collect();
    match tokio::time::timeout(limits.body_time, collect).await {
        Ok(Ok(collected)) => Ok(collected.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(too_large()),
        Ok(Err(error)) => {
            Err(closing(refuse(StatusCode::BAD_REQUEST, &format!("the body is broken: {error}"))))
        }
        Err(_) => {
            Err(closing(refuse(StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time")))
        }
    }
}

fn empty(status: StatusCode) -> HttpResponse {
    let mut response = Response::new(Full::new(Bytes::new()));
    *response.status_mut() = status;
    response
}

fn with_json(status: StatusCode, json: Vec<u8>) -> HttpResponse {
    let mut response = Response::new(Full::new(Bytes::from(json)));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// The response to a request that the VMM refused or failed.
fn failure(error: &ApiError) -> HttpResponse {
    let status =
        StatusCode::from_u16(error.kind.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    with_json(status, json_text::answer(&error.chain).unwrap_or_default())
}

/// The response to a malformed or unroutable request.
pub fn refuse(status: StatusCode, message: &str) -> HttpResponse {
    with_json(status, json_text::answer(&[message]).unwrap_or_default())
}

/// Closes the connection after the response: the rest of the request is not read.
fn closing(mut response: HttpResponse) -> HttpResponse {
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    response
}

/// The raw response to a connection above the limit.
pub fn too_many() -> Vec<u8> {
    let body = br#"["too many clients are connected, try again"]"#;
    let mut out = format!(
        "HTTP/1.1 503 \r\n{CONTENT_TYPE}: application/json\r\n\
         {CONTENT_LENGTH}: {}\r\n{CONNECTION}: close\r\n\r\n",
        body.len()
    )
    .into_bytes();
    out.extend_from_slice(body);
    out
}
