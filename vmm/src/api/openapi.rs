// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The OpenAPI description, made from the endpoint table and the definitions of the types.
//!
//! Owns the form of the document. `docs/openapi.json` is a copy that a test keeps up to date. It
//! must never describe anything that the table does not have.

use std::collections::BTreeMap;

use utoipa::openapi::path::{HttpMethod, OperationBuilder, PathItem};
use utoipa::openapi::request_body::RequestBodyBuilder;
use utoipa::openapi::response::{ResponseBuilder, ResponsesBuilder};
use utoipa::openapi::schema::ArrayBuilder;
use utoipa::openapi::{
    ComponentsBuilder, ContentBuilder, InfoBuilder, License, OpenApi, OpenApiBuilder, PathsBuilder,
    Ref, RefOr, Required, Server,
};

use super::body::Body;
use super::endpoints::{ENDPOINTS, Endpoint, Method};
use super::request::ApiErrorKind;
use super::types::API_VERSION;
use crate::config::value::{FieldValue, SchemaSet};

/// The description of the API.
pub fn document() -> OpenApi {
    let mut info = InfoBuilder::new()
        .title("Godwit API")
        .description(Some(
            "Local HTTP API for a virtual machine, compatible with that of cloud-hypervisor.",
        ))
        .version(API_VERSION)
        .build();
    info.license = Some(License::new("Apache-2.0 OR BSD-3-Clause"));
    let mut paths = PathsBuilder::new();
    for endpoint in ENDPOINTS {
        let method = match endpoint.method {
            Method::Get => HttpMethod::Get,
            Method::Put => HttpMethod::Put,
        };
        paths =
            paths.path(format!("/{}", endpoint.path), PathItem::new(method, operation(endpoint)));
    }
    OpenApiBuilder::new()
        .info(info)
        .servers(Some([Server::new("http://localhost/api/v1")]))
        .paths(paths)
        .components(Some(ComponentsBuilder::new().schemas_from_iter(schemas()).build()))
        .build()
}

/// The description as JSON text with a newline at the end.
pub fn document_json() -> String {
    let mut text = document().to_pretty_json().unwrap_or_default();
    text.push('\n');
    text
}

/// The schemas of all bodies, and that of the error response.
fn schemas() -> SchemaSet {
    let mut out = BTreeMap::new();
    for body in ENDPOINTS.iter().flat_map(|endpoint| [&endpoint.takes, &endpoint.gives]) {
        if let Some(schema) = body.schema() {
            (schema.collect)(&mut out);
        }
    }
    out.insert(
        "ErrorChain".to_owned(),
        RefOr::T(
            ArrayBuilder::new()
                .items(<String as FieldValue>::schema())
                .description(Some("What failed and why, one sentence per layer, outermost first."))
                .into(),
        ),
    );
    out
}

fn operation(endpoint: &Endpoint) -> OperationBuilder {
    let mut operation =
        OperationBuilder::new().summary(Some(endpoint.summary)).operation_id(endpoint.operation);
    let takes = match endpoint.takes {
        Body::Empty | Body::Text(_) => None,
        Body::Schema(schema) => Some((schema.name, Required::True)),
        Body::Optional(schema) => Some((schema.name, Required::False)),
    };
    if let Some((name, required)) = takes {
        operation = operation.request_body(Some(
            RequestBodyBuilder::new()
                .content("application/json", content(name))
                .required(Some(required))
                .build(),
        ));
    }
    let mut responses = ResponsesBuilder::new();
    responses = match endpoint.gives {
        Body::Empty => {
            responses.response("204", ResponseBuilder::new().description("Success.").build())
        }
        Body::Schema(schema) | Body::Optional(schema) => responses.response(
            "200",
            ResponseBuilder::new()
                .description("Success.")
                .content("application/json", content(schema.name))
                .build(),
        ),
        Body::Text(media) => {
            let text = ContentBuilder::new().schema(Some(<String as FieldValue>::schema())).build();
            let response = ResponseBuilder::new().description("Success.").content(media, text);
            responses.response("200", response.build())
        }
    };
    if matches!(endpoint.gives, Body::Optional(_)) {
        let done = ResponseBuilder::new().description("Success, without a body.");
        responses = responses.response("204", done.build());
    }
    let mut failures = vec![ApiErrorKind::Failed];
    if endpoint.takes.schema().is_some() {
        failures.push(ApiErrorKind::BadRequest);
    }
    failures.extend_from_slice(endpoint.errors);
    for kind in failures {
        let response = ResponseBuilder::new()
            .description(describe(kind))
            .content("application/json", content("ErrorChain"))
            .build();
        responses = responses.response(kind.http_status().to_string(), response);
    }
    operation.responses(responses.build())
}

fn content(schema: &str) -> utoipa::openapi::Content {
    ContentBuilder::new().schema(Some(Ref::from_schema_name(schema))).build()
}

const fn describe(kind: ApiErrorKind) -> &'static str {
    match kind {
        ApiErrorKind::BadRequest | ApiErrorKind::BadConfig => "The request is not valid.",
        ApiErrorKind::NotCreated => "There is no VM.",
        ApiErrorKind::NotFound => "There is no VM, or no device or zone of that name.",
        ApiErrorKind::NotBooted => "The VM is not in a state that allows this.",
        ApiErrorKind::AlreadyCreated | ApiErrorKind::Conflict => {
            "There is a VM already, or an operation in progress excludes this."
        }
        ApiErrorKind::NotNow => "Another operation is in progress; retry later.",
        ApiErrorKind::Failed => "The operation failed.",
    }
}
