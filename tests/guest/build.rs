// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Turns an ordinary host-target link into a freestanding one: no C start files, no libraries,
//! fixed addresses from `guest.ld`. Lives here rather than in `.cargo/config.toml` because cargo
//! reads that file from the working directory, not from alongside the manifest.

fn main() {
    let dir = std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR");
    let script = format!("{dir}/guest.ld");
    let map_file = format!("-Wl,-T,{script}");
    for arg in [
        "-nostartfiles",
        "-nostdlib",
        "-static",
        "-no-pie",
        "-Wl,--build-id=none",
        "-Wl,-z,max-page-size=4096",
        "-Wl,-z,noexecstack",
        "-Wl,-z,norelro",
        map_file.as_str(),
    ] {
        println!("cargo:rustc-link-arg-bins={arg}");
    }
    println!("cargo:rerun-if-changed={script}");
    println!("cargo:rerun-if-changed=build.rs");
}
