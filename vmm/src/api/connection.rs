// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! One HTTP request: from its head and body to the VMM and back to a response.
//!
//! Owns the limits of a body and the form of answers: a status line without a reason phrase, as
//! cloud-hypervisor's own client reads everything after the version as a number, and errors as a
//! JSON list of sentences, outermost first. It must never block the thread.

use std::convert::Infallible;
use std::future::{Future as _, poll_fn};
use std::os::fd::OwnedFd;
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;

use http_body_util::{BodyExt as _, Full, LengthLimitError, Limited};
use hyper::body::{Body as _, Bytes, Incoming};
use hyper::ext::ReasonPhrase;
use hyper::header::{ALLOW, CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, HeaderValue};
use hyper::{Request, Response, StatusCode};

use super::connection_slots::ConnectionSlot;
use super::endpoints::{self, Endpoint, Route};
use super::hangup::Hangup;
use super::request::{ApiError, ApiErrorKind, ApiHandle, VmmRequest};
use super::rights::{self, ReceivedFds};
use super::server::Limits;
use crate::json_text;

type HttpResponse = Response<Full<Bytes>>;

/// The client of a request.
pub struct Peer {
    /// Its slot.
    pub slot: Rc<ConnectionSlot>,
    /// Descriptors that the client has sent.
    pub received: ReceivedFds,
    /// Detects that the client has closed the connection.
    pub hangup: Rc<Hangup>,
}

/// Answers one request.
pub async fn serve(
    request: Request<Incoming>,
    handle: ApiHandle,
    limits: Limits,
    client: Peer,
) -> Result<HttpResponse, Infallible> {
    let mut response = answer(request, handle, limits, client).await;
    response.extensions_mut().insert(ReasonPhrase::from_static(b""));
    Ok(response)
}

/// Finds the endpoint, reads the whole body and carries the request out. The body is read before a
/// refusal, too: a client that is still sending it would see a broken pipe in place of the reason.
async fn answer(
    request: Request<Incoming>,
    handle: ApiHandle,
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
    carry_out(endpoint.path, request, &handle, &client)
        .await
        .unwrap_or_else(|error| failure(&error))
}

fn understand(endpoint: &Endpoint, body: &[u8], fds: Vec<OwnedFd>) -> Result<VmmRequest, ApiError> {
    let mut request = (endpoint.decode)(body)?;
    rights::attach(endpoint.path, &mut request, fds)?;
    Ok(request)
}

async fn carry_out(
    name: &'static str,
    request: VmmRequest,
    handle: &ApiHandle,
    client: &Peer,
) -> Result<HttpResponse, ApiError> {
    let _busy = client.slot.begin_request();
    let (mut asked, mut gone) = (pin!(handle.ask(name, request)), pin!(client.hangup.wait()));
    let reply = poll_fn(|cx| match asked.as_mut().poll(cx) {
        // The request is polled once before the hang-up counts: a request whose client has already left is
        // still carried out if it need not wait.
        Poll::Pending => gone.as_mut().poll(cx).map(|()| Err(client_is_gone())),
        answered @ Poll::Ready(_) => answered,
    })
    .await?;
    Ok(match endpoints::encode(&reply)? {
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
