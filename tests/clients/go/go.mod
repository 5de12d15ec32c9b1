// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
// What a client made by openapi-generator 5.3.0 needs; a version that Go 1.19 compiles.
module godwit.test/clients

go 1.18

require golang.org/x/oauth2 v0.24.0
