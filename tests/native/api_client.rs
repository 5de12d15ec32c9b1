// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A client that others generated from the cloud-hypervisor API drives a VM through its whole life,
//! a migration included.

use std::future::Future;

use cloud_hypervisor_client::apis::DefaultApi;
use cloud_hypervisor_client::models::{
    ConsoleConfig, ConsoleMode, CpusConfig, MemoryConfig, PayloadConfig, ReceiveMigrationData,
    SendMigrationData, SerialConfig, VmConfig, VmState,
};
use cloud_hypervisor_client::{SocketBasedApiClient, socket_based_api_client};

use crate::harness::{Suite, Vmm, image, wait_for};

pub fn add(suite: &mut Suite) {
    suite.add("api_client::whole_life_with_a_migration", whole_life);
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
    let receive = {
        let there = socket_based_api_client(destination.socket());
        let data = ReceiveMigrationData::new("tcp:127.0.0.1:0".to_owned());
        std::thread::spawn(move || block_on(there.vm_receive_migration_put(data)))
    };
    let url = wait_for("the destination to listen", || {
        let events = destination.events();
        let event = events.iter().find(|event| event["event"] == "migration-receive-ready")?;
        event["properties"]["address"].as_str().map(str::to_owned)
    });
    client.vm_send_migration_put(SendMigrationData::new(url)).await.expect("vm.send-migration");
    receive.join().expect("the thread").expect("vm.receive-migration");
    assert_eq!(source.wait_for_exit(), 0, "{}", source.output());
    assert_eq!(state(&there).await, VmState::Running);
    destination.wait_for_heartbeat();
    destination.verify();
    there.shutdown_vm().await.expect("vm.shutdown");
    there.delete_vm().await.expect("vm.delete");
    assert!(there.vm_info_get().await.is_err());
    there.shutdown_vmm().await.expect("vmm.shutdown");
    assert_eq!(destination.wait_for_exit(), 0, "{}", destination.output());
}
