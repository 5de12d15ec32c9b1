// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A client that others generated from the cloud-hypervisor API drives a VM through its whole life,
//! a migration included; and every method that it has.

use std::fmt::Debug;
use std::fs;
use std::future::Future;
use std::path::Path;

use cloud_hypervisor_client::apis::{DefaultApi, Error};
use cloud_hypervisor_client::models::{
    BalloonConfig, ConsoleConfig, ConsoleMode, CpusConfig, DeviceConfig, DiskConfig, FsConfig,
    GenericVhostUserConfig, ImageType, MemoryConfig, MemoryZoneConfig, NetConfig, PayloadConfig,
    PciDeviceInfo, PmemConfig, ReceiveMigrationData, RestoreConfig, SendMigrationData,
    SerialConfig, VdpaConfig, VmAddUserDevice, VmConfig, VmCoredumpData, VmRemoveDevice, VmResize,
    VmResizeDisk, VmResizeZone, VmSnapshotConfig, VmState, VsockConfig,
};
use cloud_hypervisor_client::{SocketBasedApiClient, socket_based_api_client};

use crate::harness::{Suite, Vmm, image, is_root, skip, wait_for};

pub fn add(suite: &mut Suite) {
    suite.add("api_client::whole_life_with_a_migration", whole_life);
    suite.add("api_client::every_method_is_answered", every_method);
}

fn config() -> VmConfig {
    let mut memory = MemoryConfig::new(192 << 20);
    memory.shared = Some(true);
    let mut payload = PayloadConfig::new();
    payload.kernel = Some(image().to_owned());
    payload.cmdline = Some("workload=random-write mem=64M pace_ns=20000".to_owned());
    let mut config = VmConfig::new(payload);
    config.cpus = Some(CpusConfig::new(2, 2));
    config.memory = Some(memory);
    config.serial = Some(SerialConfig::new(ConsoleMode::Off));
    config.console = Some(ConsoleConfig::new(ConsoleMode::Off));
    config
}

async fn state(client: &SocketBasedApiClient) -> VmState {
    client.vm_info_get().await.expect("vm.info").state
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime")
        .block_on(future)
}

/// Has the VM run in another VMM.
async fn moves(source: &mut Vmm, destination: &Vmm) {
    let client = socket_based_api_client(source.socket());
    let there = socket_based_api_client(destination.socket());
    let receive = std::thread::spawn({
        let there = socket_based_api_client(destination.socket());
        let data = ReceiveMigrationData::new("tcp:127.0.0.1:0".to_owned());
        move || block_on(there.vm_receive_migration_put(data))
    });
    let url = wait_for("the destination to listen", || {
        let events = destination.events();
        let event = events.iter().find(|event| event["event"] == "migration-receive-ready")?;
        event["properties"]["address"].as_str().map(str::to_owned)
    });
    client.vm_send_migration_put(SendMigrationData::new(url)).await.expect("vm.send-migration");
    receive.join().expect("the thread").expect("vm.receive-migration");
    assert_eq!(source.wait_for_exit(), 0, "{}", source.output());
    assert_eq!(state(&there).await, VmState::Running);
}

fn whole_life() {
    let source = Vmm::empty();
    let destination = Vmm::empty();
    block_on(drive(source, destination));
}

async fn drive(mut source: Vmm, mut destination: Vmm) {
    let client = socket_based_api_client(source.socket());
    let ping = client.vmm_ping_get().await.expect("vmm.ping");
    assert_eq!(ping.pid, Some(i64::from(source.pid())));
    client.create_vm(config()).await.expect("vm.create");
    assert_eq!(state(&client).await, VmState::Created);
    client.boot_vm().await.expect("vm.boot");
    let info = client.vm_info_get().await.expect("vm.info");
    assert_eq!(info.state, VmState::Running);
    assert_eq!(info.memory_actual_size, Some(192 << 20));
    client.vm_counters_get().await.expect("vm.counters");
    source.wait_for_work(10_000);
    client.pause_vm().await.expect("vm.pause");
    assert_eq!(state(&client).await, VmState::Paused);
    client.resume_vm().await.expect("vm.resume");
    source.wait_for_heartbeat();

    let there = socket_based_api_client(destination.socket());
    moves(&mut source, &destination).await;
    destination.wait_for_heartbeat();
    destination.verify();
    there.shutdown_vm().await.expect("vm.shutdown");
    there.delete_vm().await.expect("vm.delete");
    assert!(there.vm_info_get().await.is_err());
    there.shutdown_vmm().await.expect("vmm.shutdown");
    assert_eq!(destination.wait_for_exit(), 0, "{}", destination.output());
}

fn every_method() {
    if !is_root() {
        skip("taps need root".to_owned());
    }
    let folder = tempfile::TempDir::with_prefix("godwit-client-").expect("a folder");
    block_on(call_every_method(Vmm::empty(), Vmm::empty(), folder.path()));
}

async fn call_every_method(mut here: Vmm, mut there: Vmm, folder: &Path) {
    live(&here, folder).await;
    moves(&mut here, &there).await;
    there.wait_for_heartbeat();
    let client = socket_based_api_client(there.socket());
    grow(&client, folder).await;
    client.reboot_vm().await.expect("vm.reboot");
    there.wait_for_heartbeat();
    // The path that the description had until version 52 of cloud-hypervisor, which never answered there.
    assert_eq!(refusal(client.vmm_nmi_put().await).0, 404);
    client.shutdown_vm().await.expect("vm.shutdown");
    assert_eq!(state(&client).await, VmState::Created);
    client.delete_vm().await.expect("vm.delete");
    let snapshot = format!("file://{}", folder.join("snapshot").display());
    client.vm_restore_put(RestoreConfig::new(snapshot)).await.expect("vm.restore");
    assert_eq!(state(&client).await, VmState::Paused);
    client.resume_vm().await.expect("vm.resume");
    there.wait_for_heartbeat();
    client.delete_vm().await.expect("vm.delete");
    client.shutdown_vmm().await.expect("vmm.shutdown");
    assert_eq!(there.wait_for_exit(), 0, "{}", there.output());
}

fn text(path: &Path) -> String {
    path.to_str().expect("UTF-8").to_owned()
}

fn disk(folder: &Path, name: &str) -> DiskConfig {
    let path = folder.join(name);
    fs::write(&path, vec![0; 1 << 20]).expect("an image");
    let mut disk = DiskConfig::new();
    disk.path = Some(text(&path));
    disk.id = Some(name.to_owned());
    disk.image_type = Some(ImageType::Raw);
    disk
}

/// The life of a VM until it moves.
async fn live(vmm: &Vmm, folder: &Path) {
    let client = socket_based_api_client(vmm.socket());
    client.vmm_ping_get().await.expect("vmm.ping");
    assert_eq!(refusal(client.vm_info_get().await).0, 404);
    let mut zone = MemoryZoneConfig::new("ram".to_owned(), 192 << 20);
    zone.shared = Some(true);
    zone.hotplug_size = Some(256 << 20);
    let mut memory = MemoryConfig::new(0);
    memory.hotplug_method = Some("VirtioMem".to_owned());
    memory.zones = Some(vec![zone]);
    let mut config = config();
    config.memory = Some(memory);
    config.balloon = Some(BalloonConfig::new(0));
    client.create_vm(config).await.expect("vm.create");
    // Before the boot there is nothing to be said of its place, which this client takes for an error.
    let added = client.vm_add_disk_put(disk(folder, "image")).await;
    assert!(matches!(added, Err(Error::Serde(_))), "{added:?}");
    let info = client.vm_info_get().await.expect("vm.info");
    assert_eq!(info.config.disks.map(|disks| disks.len()), Some(1));
    client.boot_vm().await.expect("vm.boot");
    vmm.wait_for_heartbeat();
    assert!(client.vm_counters_get().await.expect("vm.counters").contains_key("image"));
    // First, as memory that was added excludes some of these devices.
    refuse(&client, folder).await;
    let mut resize = VmResize::new();
    resize.desired_balloon = Some(32 << 20);
    client.vm_resize_put(resize).await.expect("vm.resize");
    let mut resize = VmResizeDisk::new();
    (resize.id, resize.desired_size) = (Some("image".to_owned()), Some(2 << 20));
    client.vm_resize_disk_put(resize).await.expect("vm.resize-disk");
    let mut resize = VmResizeZone::new();
    (resize.id, resize.desired_ram) = (Some("ram".to_owned()), Some(320 << 20));
    client.vm_resize_zone_put(resize).await.expect("vm.resize-zone");
    client.pause_vm().await.expect("vm.pause");
    let directory = folder.join("snapshot");
    fs::create_dir(&directory).expect("a folder");
    let mut snapshot = VmSnapshotConfig::new();
    snapshot.destination_url = Some(format!("file://{}", directory.display()));
    client.vm_snapshot_put(snapshot).await.expect("vm.snapshot");
    let file = folder.join("core");
    let mut dump = VmCoredumpData::new();
    dump.destination_url = Some(format!("file://{}", file.display()));
    client.vm_coredump_put(dump).await.expect("vm.coredump");
    assert!(file.exists());
    client.resume_vm().await.expect("vm.resume");
    client.power_button_vm().await.expect("vm.power-button");
    vmm.wait_for_heartbeat();
}

/// Asks for what cannot be had here: each reason names it. An empty path is refused at once, and a socket at which no
/// process listens after ten seconds.
async fn refuse(client: &SocketBasedApiClient, folder: &Path) {
    let nowhere = text(&folder.join("nowhere"));
    for refused in [
        client.vm_add_device_put(DeviceConfig::new(nowhere.clone())).await,
        client.vm_add_vdpa_put(VdpaConfig::new(nowhere.clone(), 1)).await,
    ] {
        let (status, body) = refusal(refused);
        assert!(status == 500 && body.contains(&nowhere), "{status}: {body}");
    }
    let fs = FsConfig::new("t".to_owned(), String::new(), 1, 1024);
    // Its names are those of an earlier version, which cloud-hypervisor v53 does not have either.
    let mut generic = GenericVhostUserConfig::new(nowhere, 26);
    generic.queue_size = Some(vec![1024]);
    for (refused, reason) in [
        (
            client.vm_add_user_device_put(VmAddUserDevice::new(String::new())).await,
            "needs a socket",
        ),
        (client.vm_add_fs_put(fs).await, "needs a socket"),
        (client.vm_add_generic_vhost_user_put(generic).await, "queue_size"),
    ] {
        let (status, body) = refusal(refused);
        assert!(status == 400 && body.contains(reason), "{status}: {body}");
    }
}

/// Devices that come and go while it runs.
async fn grow(client: &SocketBasedApiClient, folder: &Path) {
    let file = folder.join("pmem");
    fs::write(&file, vec![0; 2 << 20]).expect("a file");
    let socket = text(&folder.join("vsock"));
    let added = [
        client.vm_add_disk_put(disk(folder, "volume")).await,
        client.vm_add_net_put(NetConfig::new()).await,
        client.vm_add_pmem_put(PmemConfig::new(text(&file))).await,
        client.vm_add_vsock_put(VsockConfig::new(3, socket)).await,
    ];
    let added: Result<Vec<PciDeviceInfo>, _> = added.into_iter().collect();
    let added = added.expect("vm.add-*");
    assert!(added.iter().all(|device| device.bdf.starts_with("0000:00:")), "{added:?}");
    let mut remove = VmRemoveDevice::new();
    remove.id = Some("volume".to_owned());
    client.vm_remove_device_put(remove).await.expect("vm.remove-device");
}

/// Status and body of a refusal.
fn refusal<T: Debug>(result: Result<T, Error>) -> (u16, String) {
    match result {
        Err(Error::Api(error)) => (error.code.as_u16(), error.body),
        other => panic!("{other:?}"),
    }
}
