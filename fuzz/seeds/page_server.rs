// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Seeds that are orders to a page server: memory, files, a takeover request.

use super::Seed;

const MEMORY: &[u8] = br#"{"version":1,"files":1,"regions":[{"region":{"name":"mem0","gpa":0,"len_bytes":4194304,"host_page_bytes":4096,"backing":"shared"},"file":0,"file_offset":0},{"region":{"name":"mem0","gpa":4294967296,"len_bytes":2097152,"host_page_bytes":4096,"backing":"shared"},"file":0,"file_offset":4194304}]}"#;
const TAKEOVER: &[u8] = br#"{"version":1,"to":"tcp:host-b:6000","id":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16],"attempt":1,"bulk":1,"urgent":2,"bandwidth_bytes_per_s":125000000,"recover_timeout_ms":600000,"connect_timeout_ms":10000,"stall_timeout_ms":10000,"units":[[1,512],[1,1]]}"#;

fn order(code: u16, payload: &[u8]) -> Vec<u8> {
    let len_bytes = payload.len() as u64;
    [&code.to_le_bytes()[..], &[0; 6], &len_bytes.to_le_bytes(), payload].concat()
}

pub fn seeds() -> Vec<Seed> {
    let all = [order(1, MEMORY), order(2, &[0; 4]), order(3, TAKEOVER)].concat();
    [("whole", all), ("memory", order(1, MEMORY))]
        .map(|(name, contents)| Seed::new("page_server_orders", name, contents))
        .into()
}
