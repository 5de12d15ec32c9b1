// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of MSI-X.
#![expect(clippy::unwrap_used, reason = "tests")]

use proptest::prelude::*;

use super::*;
use crate::fakes::{FakeMsiSource, FakeVector};

const ENABLED: u16 = CONTROL_ENABLE;
const MASKED: u16 = CONTROL_ENABLE | CONTROL_FUNCTION_MASK;
const ADDRESS: u64 = 0x100_fee0_1000;

fn message(data: u32) -> MsiMessage {
    MsiMessage { address: ADDRESS, data }
}

struct Rig {
    source: FakeMsiSource,
    msix: Msix,
}

impl Rig {
    fn new(count: u16) -> Self {
        let source = FakeMsiSource::new(64);
        let msix = Msix::new(count, &source).unwrap();
        Self { source, msix }
    }

    fn vector(&self, index: usize) -> Arc<FakeVector> {
        self.source.vector(index).unwrap()
    }

    /// As Linux writes an entry: address, address, data, then the mask bit.
    fn program(&self, vector: u64, data: u32) {
        let base = vector * ENTRY_LEN_BYTES;
        let [low, high] =
            [ADDRESS & 0xffff_ffff, ADDRESS >> 32].map(|half| u32::try_from(half).unwrap());
        for (offset, value) in [(0, low), (4, high), (8, data)] {
            self.msix.write_table(base + offset, &value.to_le_bytes());
        }
        self.mask(vector, false);
    }

    fn mask(&self, vector: u64, masked: bool) {
        self.msix.write_table(vector * ENTRY_LEN_BYTES + 12, &u32::from(masked).to_le_bytes());
    }

    fn pending(&self) -> u64 {
        let mut data = [0; 8];
        self.msix.read_pba(0, &mut data);
        u64::from_le_bytes(data)
    }

    fn delivered(&self, vector: usize) -> Vec<MsiMessage> {
        std::mem::take(&mut self.vector(vector).record().delivered)
    }
}

#[test]
fn an_unmasked_vector_delivers() {
    let rig = Rig::new(3);
    rig.msix.set_control(ENABLED);
    rig.program(1, 0x41);
    rig.msix.trigger(1);
    assert_eq!(rig.delivered(1), [message(0x41)]);
    assert_eq!(rig.pending(), 0);
    assert_eq!(rig.vector(0).record().programmed, None);
}

#[test]
fn a_masked_vector_waits_and_shows_as_pending() {
    let rig = Rig::new(3);
    rig.msix.set_control(ENABLED);
    rig.program(2, 7);
    rig.mask(2, true);
    rig.msix.trigger(2);
    assert_eq!(rig.pending(), 1 << 2);
    assert_eq!(rig.pending(), 1 << 2, "looking does not lose it");
    assert_eq!(rig.delivered(2), []);
    rig.mask(2, false);
    assert_eq!(rig.delivered(2), [message(7)]);
    assert_eq!(rig.pending(), 0);
}

#[test]
fn many_triggers_while_masked_are_one_interrupt() {
    let rig = Rig::new(1);
    rig.msix.set_control(ENABLED);
    rig.program(0, 7);
    rig.mask(0, true);
    rig.msix.trigger(0);
    assert_eq!(rig.pending(), 1);
    rig.mask(0, false);
    assert_eq!(rig.delivered(0), [message(7)]);
    rig.mask(0, true);
    rig.mask(0, false);
    assert_eq!(rig.delivered(0), [], "nothing is delivered twice");
}

#[test]
fn the_function_mask_holds_all_back() {
    let rig = Rig::new(2);
    rig.msix.set_control(MASKED);
    rig.program(0, 1);
    rig.program(1, 2);
    rig.msix.trigger(0);
    rig.msix.trigger(1);
    assert_eq!(rig.pending(), 0b11);
    rig.mask(1, true);
    rig.msix.set_control(ENABLED);
    assert_eq!(rig.delivered(0), [message(1)]);
    assert_eq!(rig.delivered(1), []);
    assert_eq!(rig.pending(), 0b10);
}

#[test]
fn nothing_is_delivered_while_off_and_nothing_lost() {
    let rig = Rig::new(1);
    rig.program(0, 9);
    rig.msix.trigger(0);
    assert_eq!(rig.delivered(0), []);
    rig.msix.set_control(ENABLED);
    assert_eq!(rig.delivered(0), [message(9)]);
    rig.msix.set_control(0);
    assert_eq!(rig.vector(0).record().programmed, None);
}

#[test]
fn a_new_message_takes_effect_at_once() {
    let rig = Rig::new(1);
    rig.msix.set_control(ENABLED);
    rig.program(0, 1);
    rig.msix.write_table(8, &2_u32.to_le_bytes());
    rig.msix.trigger(0);
    assert_eq!(rig.delivered(0), [message(2)]);
}

#[test]
fn the_table_reads_back_what_can_be_written() {
    let rig = Rig::new(2);
    rig.msix.write_table(16, &[0xff; 16]);
    let mut data = [0; 32];
    rig.msix.read_table(0, &mut data);
    assert_eq!(data[..16], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0], "masked after reset");
    assert_eq!(data[16..28], [0xff; 12]);
    assert_eq!(data[28..], [1, 0, 0, 0], "only the mask bit of the control word is there");
    rig.msix.write_table(8, &[1, 0, 0, 0, 0, 0, 0, 0, 2]);
    rig.msix.read_table(8, &mut data[..9]);
    assert_eq!(data[..9], [1, 0, 0, 0, 0, 0, 0, 0, 2], "a write may span two entries");
}

#[test]
fn vectors_that_do_not_exist_are_ignored() {
    let rig = Rig::new(1);
    rig.msix.trigger(1);
    rig.msix.trigger(NO_VECTOR);
    rig.msix.write_table(16, &[0xff; 8]);
    let mut data = [0xaa; 8];
    rig.msix.read_table(u64::MAX, &mut data);
    assert_eq!(data, [0; 8]);
    rig.msix.read_pba(u64::MAX, &mut data);
    assert_eq!(data, [0; 8]);
}

#[test]
fn impossible_counts_are_refused() {
    let source = FakeMsiSource::new(4);
    assert!(matches!(Msix::new(0, &source), Err(MsixError::Count { count: 0 })));
    assert!(matches!(Msix::new(2049, &source), Err(MsixError::Count { count: 2049 })));
    let exhausted = Msix::new(5, &source).err().unwrap();
    assert!(matches!(exhausted, MsixError::Vector { vector: 4, .. }));
}

#[test]
fn the_capability_names_size_and_places() {
    let rig = Rig::new(4);
    let (body, writable) = rig.msix.capability(2, 0x4000, 0xc000);
    assert_eq!(body, [3, 0, 2, 0x40, 0, 0, 2, 0xc0, 0, 0]);
    assert_eq!(writable, [0, 0xc0]);
}

#[test]
fn reset_forgets_everything() {
    let rig = Rig::new(1);
    rig.msix.set_control(ENABLED);
    rig.program(0, 1);
    rig.mask(0, true);
    rig.msix.trigger(0);
    rig.msix.reset();
    assert_eq!(rig.msix.save().entries, Rig::new(1).msix.save().entries);
    rig.msix.set_control(ENABLED);
    rig.program(0, 1);
    assert_eq!(rig.delivered(0), []);
}

#[test]
fn saved_state_comes_back_with_its_pending_bits() {
    let rig = Rig::new(2);
    rig.msix.set_control(ENABLED);
    rig.program(0, 1);
    rig.program(1, 2);
    rig.mask(1, true);
    rig.msix.trigger(1);
    let state = rig.msix.save();
    assert!(state.entries[1].pending && !state.entries[0].pending);
    rig.mask(1, false);
    assert_eq!(rig.delivered(1), [message(2)], "saving does not take the interrupt away");

    let other = Rig::new(2);
    other.msix.restore(&state, ENABLED).unwrap();
    assert_eq!(other.msix.save(), state);
    assert_eq!(other.vector(0).record().programmed, Some(message(1)));
    assert_eq!(other.delivered(0), []);
    other.mask(1, false);
    assert_eq!(other.delivered(1), [message(2)]);
}

#[test]
fn a_message_that_kvm_refuses_masks_its_vector_and_can_be_restored() {
    let rig = Rig::new(2);
    rig.msix.set_control(ENABLED);
    rig.program(0, 7);
    rig.program(1, 8);
    let high = |value: u32| rig.msix.write_table(4, &value.to_le_bytes());
    high(0x80);
    assert_eq!(rig.vector(0).record().programmed, None);
    assert_eq!(rig.vector(1).record().programmed, Some(message(8)));
    rig.msix.trigger(0);
    let other = Rig::new(2);
    // Programming it would fail, and with it the restore.
    other.vector(0).record().refuses = true;
    other.msix.restore(&rig.msix.save(), ENABLED).unwrap();
    assert_eq!(other.vector(1).record().programmed, Some(message(8)));
    // What was pending comes with a message that is taken.
    high(u32::try_from(ADDRESS >> 32).unwrap());
    assert_eq!(rig.vector(0).record().delivered, [message(7)]);
}

#[test]
fn a_pending_vector_that_is_not_masked_is_delivered_on_restore() {
    let rig = Rig::new(1);
    let entry = MsixEntryState { address: ADDRESS, data: 5, masked: false, pending: true };
    rig.msix.restore(&MsixState { version: 1, entries: vec![entry] }, ENABLED).unwrap();
    assert_eq!(rig.delivered(0), [message(5)]);
}

#[test]
fn foreign_states_are_refused() {
    let rig = Rig::new(2);
    let good = rig.msix.save();
    let version = MsixState { version: 2, ..good.clone() };
    assert!(matches!(
        rig.msix.restore(&version, 0),
        Err(MsixError::StateVersion { found: 2, newest: 1 })
    ));
    let shorter = MsixState { entries: good.entries[1..].to_vec(), ..good };
    assert!(matches!(
        rig.msix.restore(&shorter, 0),
        Err(MsixError::StateLength { found: 1, expected: 2 })
    ));
}

#[derive(Clone, Debug)]
enum Step {
    Control(u16),
    Table(u64, Vec<u8>),
    Trigger(u16),
    Look,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        prop::sample::select(vec![0, ENABLED, MASKED, CONTROL_FUNCTION_MASK])
            .prop_map(Step::Control),
        (0_u64..40, prop::collection::vec(any::<u8>(), 0..9))
            .prop_map(|(offset, data)| Step::Table(offset, data)),
        (0_u64..2, any::<bool>())
            .prop_map(|(vector, mask)| Step::Table(vector * 16 + 12, vec![mask.into()])),
        (0_u16..3).prop_map(Step::Trigger),
        Just(Step::Look),
    ]
}

proptest! {
    /// After any history an interrupt that was raised last is either delivered or pending, and
    /// only unmasked vectors with messages that KVM takes are live.
    #[test]
    fn no_interrupt_is_lost(steps in prop::collection::vec(step(), 0..48), last in 0_u16..2) {
        let rig = Rig::new(2);
        for step in steps {
            match step {
                Step::Control(control) => rig.msix.set_control(control),
                Step::Table(offset, data) => rig.msix.write_table(offset, &data),
                Step::Trigger(vector) => rig.msix.trigger(vector),
                Step::Look => drop(rig.msix.save()),
            }
        }
        let at = usize::from(last);
        rig.delivered(at);
        rig.msix.trigger(last);
        let delivered = !rig.delivered(at).is_empty();
        let pending = rig.pending() >> last & 1 == 1;
        prop_assert!(delivered ^ pending);
        let MsixEntryState { address, data, masked, .. } = rig.msix.save().entries[at];
        let masked = masked || MsiMessage { address, data }.is_refused();
        rig.msix.set_control(ENABLED);
        prop_assert_eq!(rig.vector(at).record().programmed.is_some(), !masked);
    }
}
