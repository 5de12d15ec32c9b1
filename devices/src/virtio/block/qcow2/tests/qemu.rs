// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The same images, seen by `qemu-img`, where it is installed.

use std::process::{Command, Stdio};

use super::*;

fn qemu_img(arguments: &[&str], directory: &Path) -> Option<String> {
    let command = Command::new("qemu-img")
        .args(arguments)
        .current_dir(directory)
        .stdin(Stdio::null())
        .output();
    let output = match command {
        Ok(output) => output,
        Err(error) => {
            test_skip::skip!("qemu-img cannot be run: {error}");
            return None;
        }
    };
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "qemu-img {arguments:?}: {out} {err}");
    Some(out)
}

/// What `qemu-img` says of an image and reads from it.
fn check(images: &Images, name: &str, expected: &[u8]) {
    let directory = images.0.path();
    let Some(report) = qemu_img(&["check", "-f", "qcow2", name], directory) else { return };
    assert!(report.contains("No errors were found"), "{report}");
    qemu_img(&["convert", "-f", "qcow2", "-O", "raw", name, "flat"], directory);
    let mut found = fs::read(images.path("flat")).unwrap();
    found.resize(expected.len().max(found.len()), 0);
    assert!(found == expected, "qemu-img reads something else");
}

#[test]
fn what_a_process_that_died_leaves_is_repaired_there() {
    let images = Images::new();
    let path = images.add("a", small().image());
    let lock = open(&config(&path)).unwrap();
    let mut flat = empty();
    for (byte, offset) in [(1, 0), (2, 3 << 20)] {
        lock.disk.write_all_at(&[byte; 4096], offset).unwrap();
        flat[usize::try_from(offset).unwrap()..][..4096].fill(byte);
        if byte == 1 {
            lock.disk.flush().unwrap();
        }
    }
    let died = images.add("died", fs::read(&path).unwrap());
    refusal(open(&config(&died)));
    let repair = ["check", "-f", "qcow2", "-r", "all", "died"];
    if qemu_img(&repair, images.0.path()).is_none() {
        return;
    }
    let found = contents(&open(&config(&died)).unwrap());
    assert!(found[..4096] == flat[..4096], "flushed data are lost");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    #[test]
    fn what_is_written_here_is_read_there(steps in steps(), version in 2..=3_u32) {
        let images = Images::new();
        let path = images.add("a", Sample { version, ..small() }.image());
        let mut flat = empty();
        let lock = open(&config(&path)).unwrap();
        run(&lock, &mut flat, &steps);
        lock.unlock().unwrap();
        check(&images, "a", &flat);
    }
}

#[test]
fn what_is_made_there_is_read_and_changed_here() {
    let makes: [&[&str]; 7] = [
        &["-o", "cluster_size=512"],
        &["-o", "cluster_size=2M"],
        &["-o", "refcount_bits=1"],
        &["-o", "refcount_bits=64,lazy_refcounts=on"],
        &["-o", "compat=0.10"],
        &["-o", "preallocation=metadata"],
        &["-c"],
    ];
    for options in makes {
        let images = Images::new();
        let directory = images.0.path();
        let mut flat = pattern(SIZE);
        images.add("source", &flat);
        let convert = ["convert", "-f", "raw", "-O", "qcow2"];
        let arguments = [&convert[..], options, &["source", "a"]].concat();
        if qemu_img(&arguments, directory).is_none() {
            return;
        }
        let lock = open(&config(&images.path("a"))).unwrap();
        assert!(contents(&lock) == flat, "{options:?}");
        let places = [(512, 512), (70_000 / 512 * 512, 130 * 1024), (SIZE - 512, 512)];
        for (number, (offset, len_bytes)) in places.into_iter().enumerate() {
            let byte = u8::try_from(number).unwrap() + 1;
            let steps = [
                Step::Write { offset, len_bytes, byte },
                Step::Discard { offset: 1 << 20, len_bytes: 1 << 19 },
                Step::Zero { offset: offset / 2 / 512 * 512, len_bytes: 1024, free: true },
                Step::Reload,
            ];
            run(&lock, &mut flat, &steps);
        }
        lock.unlock().unwrap();
        drop(lock);
        check(&images, "a", &flat);
    }
}

#[test]
fn what_a_snapshot_in_the_image_shares_stays_as_it_was() {
    let images = Images::new();
    let directory = images.0.path();
    let flat = pattern(SIZE);
    images.add("source", &flat);
    let made = qemu_img(&["convert", "-f", "raw", "-O", "qcow2", "source", "a"], directory);
    if made.is_none() {
        return;
    }
    qemu_img(&["snapshot", "-c", "before", "a"], directory);
    let mut changed = flat.clone();
    let lock = open(&config(&images.path("a"))).unwrap();
    let cluster_bytes = 1 << 16;
    for is_loaded_anew in [false, true] {
        // Then the header says that the image is in use.
        lock.disk.write_all_at(&[9; 512], 4096).unwrap();
        // What the snapshot has is written elsewhere; its table is the image's own only once it is read again.
        assert_eq!(placed::write(&lock.disk, &[9; 512], 8192), is_loaded_anew);
        assert!(!placed::write(&lock.disk, &[9; 512], 8192 + cluster_bytes));
        let shared = placed::read(&lock.disk, 8192 + cluster_bytes, 512);
        assert_eq!(shared.is_some(), is_loaded_anew);
        run(&lock, &mut changed, &[Step::Reload]);
    }
    let steps = [
        Step::Write { offset: 4096, len_bytes: 200 * 1024, byte: 9 },
        Step::Discard { offset: 1 << 20, len_bytes: 1 << 20 },
        Step::Zero { offset: 3 << 20, len_bytes: 1 << 20, free: true },
    ];
    run(&lock, &mut changed, &steps);
    lock.unlock().unwrap();
    drop(lock);
    check(&images, "a", &changed);
    qemu_img(&["snapshot", "-a", "before", "a"], directory);
    check(&images, "a", &flat);
}

#[test]
fn a_chain_that_is_made_there_is_read_here() {
    let images = Images::new();
    let directory = images.0.path();
    let flat = pattern(SIZE);
    images.add("base.raw", &flat);
    let create = |name: &str, backing: &str, format: &str| {
        qemu_img(&["create", "-f", "qcow2", "-b", backing, "-F", format, name], directory)
    };
    if create("middle", "base.raw", "raw").is_none() {
        return;
    }
    create("top", "middle", "qcow2");
    let lock = open(&config(&images.path("top"))).unwrap();
    assert!(contents(&lock) == flat);
}
