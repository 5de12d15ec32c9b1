// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Writes the seed corpora: `seeds DIRECTORY` makes a folder in it for each fuzz target.
//!
//! A seed is a valid input from which mutations start. Everything is made from the formats
//! themselves and not with the code under test, so that a mistake there does not hide in the seeds.
//! It uses nothing but the standard library: `scripts/fuzz` compiles it by itself.

mod cloud_hypervisor;
mod disk;
mod kernel;
mod migration;
mod page_server;
mod pci;
mod platform;
mod pool;
mod snapshot;
mod text;
mod tls;
mod virtio;

use std::io;
use std::path::Path;

/// One input: the target it is for, its file name, its contents.
pub struct Seed {
    /// Name of the target.
    pub target: &'static str,
    /// Name of the file.
    pub name: String,
    /// What is fed to the target.
    pub contents: Vec<u8>,
}

impl Seed {
    fn new(target: &'static str, name: impl Into<String>, contents: impl Into<Vec<u8>>) -> Self {
        Self { target, name: name.into(), contents: contents.into() }
    }
}

/// Puts bytes into an image at an offset; the image is long enough.
fn put(image: &mut [u8], at: usize, bytes: &[u8]) {
    image[at..at + bytes.len()].copy_from_slice(bytes);
}

/// The seeds of all targets.
pub fn all() -> Vec<Seed> {
    let sets = [
        text::seeds(),
        cloud_hypervisor::seeds(),
        disk::seeds(),
        kernel::seeds(),
        migration::seeds(),
        page_server::seeds(),
        pci::seeds(),
        platform::seeds(),
        pool::seeds(),
        snapshot::seeds(),
        tls::seeds(),
        virtio::seeds(),
    ];
    sets.into_iter().flatten().collect()
}

fn write(seeds: &[Seed], directory: &Path) -> io::Result<()> {
    for seed in seeds {
        let folder = directory.join(seed.target);
        std::fs::create_dir_all(&folder)?;
        std::fs::write(folder.join(&seed.name), &seed.contents)?;
    }
    Ok(())
}

fn main() -> io::Result<()> {
    let Some(directory) = std::env::args_os().nth(1) else {
        return Err(io::Error::other("name the directory to write to"));
    };
    let seeds = all();
    write(&seeds, Path::new(&directory))?;
    println!("{} seeds in {}", seeds.len(), directory.display());
    Ok(())
}
