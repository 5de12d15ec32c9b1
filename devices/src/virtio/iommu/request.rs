// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The requests to an IOMMU, its answers and its fault reports as bytes (virtio 1.3, 5.13.6).
//!
//! Owns their layout. It must never access guest memory, nor know of domains and mappings.

use super::endpoint::Fault;
use super::table::WRITE;

/// Bytes of the longest request.
pub(super) const REQUEST_LEN_BYTES_MAX: usize = 72;
/// Bytes of the status behind each request.
pub(super) const TAIL_LEN_BYTES: usize = 4;
/// Bytes for the properties of an endpoint, as the configuration names them.
pub(super) const PROBE_LEN_BYTES: usize = 64;
/// Bytes of a fault report.
pub(super) const FAULT_LEN_BYTES: usize = 24;

/// Addresses to which devices write interrupts on this architecture. They are not translated.
pub(super) const MSI_FIRST: u64 = 0xfee0_0000;
/// The last of them.
pub(super) const MSI_LAST: u64 = 0xfeef_ffff;

const ATTACH: u8 = 1;
const DETACH: u8 = 2;
const MAP: u8 = 3;
const UNMAP: u8 = 4;
const PROBE: u8 = 5;

/// The domain to attach to is one without translation.
const ATTACH_BYPASS: u32 = 1;
const RESERVED_MEMORY: u16 = 1;
const RESERVED_FOR_MSI: u8 = 1;
const FAULT_IN_DOMAIN: u8 = 2;
const FAULT_WITHOUT_DOMAIN: u8 = 1;
const FAULT_HAS_ADDRESS: u32 = 1 << 8;

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Status {
    Ok,
    Unsupported,
    Invalid,
    Range,
    NoEntry,
    NoMemory,
}

impl Status {
    pub(super) fn code(self) -> u8 {
        match self {
            Self::Ok => 0,
            Self::Unsupported => 2,
            Self::Invalid => 4,
            Self::Range => 5,
            Self::NoEntry => 6,
            Self::NoMemory => 8,
        }
    }

    pub(super) fn tail(self) -> [u8; TAIL_LEN_BYTES] {
        [self.code(), 0, 0, 0]
    }
}

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Request {
    Attach { domain: u32, endpoint: u32, bypass: bool },
    Detach { domain: u32, endpoint: u32 },
    Map { domain: u32, first: u64, last: u64, gpa: u64, flags: u32 },
    Unmap { domain: u32, first: u64, last: u64 },
    Probe { endpoint: u32 },
}

/// Whether a request has room for properties before its status, whatever else it is.
pub(super) fn is_probe(request: &[u8]) -> bool {
    request.first() == Some(&PROBE)
}

fn array<const LEN: usize>(request: &[u8], at: usize) -> Result<[u8; LEN], Status> {
    let bytes = request.get(at..at.saturating_add(LEN));
    bytes.and_then(|bytes| bytes.try_into().ok()).ok_or(Status::Invalid)
}

fn small(request: &[u8], at: usize) -> Result<u32, Status> {
    array(request, at).map(u32::from_le_bytes)
}

fn large(request: &[u8], at: usize) -> Result<u64, Status> {
    array(request, at).map(u64::from_le_bytes)
}

/// Reserved bytes, which have to be zero.
fn zeros<const LEN: usize>(request: &[u8], at: usize) -> Result<(), Status> {
    if array::<LEN>(request, at)? == [0; LEN] { Ok(()) } else { Err(Status::Invalid) }
}

impl Request {
    /// Reads a request, without its status.
    pub(super) fn parse(request: &[u8]) -> Result<Self, Status> {
        let kind = *request.first().ok_or(Status::Invalid)?;
        if !(ATTACH..=PROBE).contains(&kind) {
            return Err(Status::Unsupported);
        }
        let first_number = small(request, 4)?;
        match kind {
            ATTACH => {
                zeros::<4>(request, 16)?;
                let flags = small(request, 12)?;
                if flags & !ATTACH_BYPASS != 0 {
                    return Err(Status::Invalid);
                }
                let endpoint = small(request, 8)?;
                Ok(Self::Attach { domain: first_number, endpoint, bypass: flags != 0 })
            }
            DETACH => {
                // Whatever its reserved bytes are, they have to be there.
                array::<8>(request, 12)?;
                Ok(Self::Detach { domain: first_number, endpoint: small(request, 8)? })
            }
            MAP => Ok(Self::Map {
                domain: first_number,
                first: large(request, 8)?,
                last: large(request, 16)?,
                gpa: large(request, 24)?,
                flags: small(request, 32)?,
            }),
            UNMAP => {
                zeros::<4>(request, 24)?;
                let (first, last) = (large(request, 8)?, large(request, 16)?);
                Ok(Self::Unmap { domain: first_number, first, last })
            }
            _ => Ok(Self::Probe { endpoint: first_number }),
        }
    }
}

/// The properties of an endpoint: where its interrupts go.
pub(super) fn properties() -> [u8; PROBE_LEN_BYTES] {
    let mut bytes = [0; PROBE_LEN_BYTES];
    let kind = RESERVED_MEMORY.to_le_bytes();
    let value_len = 20_u16.to_le_bytes();
    let subtype = [RESERVED_FOR_MSI, 0, 0, 0];
    let (first, last) = (MSI_FIRST.to_le_bytes(), MSI_LAST.to_le_bytes());
    let property = kind.iter().chain(&value_len).chain(&subtype).chain(&first).chain(&last);
    bytes.iter_mut().zip(property).for_each(|(to, from)| *to = *from);
    bytes
}

/// The report of a fault.
pub(super) fn fault_report(fault: Fault) -> [u8; FAULT_LEN_BYTES] {
    let Fault { endpoint, address, access, in_domain } = fault;
    let mut bytes = [0; FAULT_LEN_BYTES];
    let reason = if in_domain { FAULT_IN_DOMAIN } else { FAULT_WITHOUT_DOMAIN };
    let access = if access & WRITE != 0 { WRITE } else { access };
    let head = [reason, 0, 0, 0];
    let flags = (access | FAULT_HAS_ADDRESS).to_le_bytes();
    let (endpoint, address) = (endpoint.to_le_bytes(), address.to_le_bytes());
    let report = head.iter().chain(&flags).chain(&endpoint).chain(&[0; 4]).chain(&address);
    bytes.iter_mut().zip(report).for_each(|(to, from)| *to = *from);
    bytes
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn reserved_bytes_and_short_requests_are_refused() {
        for (kind, len_bytes, reserved) in
            [(ATTACH, 20, 16..20), (DETACH, 20, 0..0), (MAP, 36, 0..0), (UNMAP, 28, 24..28)]
        {
            let mut request = vec![0; len_bytes];
            request[0] = kind;
            assert!(Request::parse(&request).is_ok(), "{kind}");
            for len_bytes in 1..len_bytes {
                assert_eq!(Request::parse(&request[..len_bytes]), Err(Status::Invalid));
            }
            for at in reserved {
                request[at] = 1;
                assert_eq!(Request::parse(&request), Err(Status::Invalid), "{kind} {at}");
                request[at] = 0;
            }
        }
        assert_eq!(Request::parse(&[]), Err(Status::Invalid));
        assert_eq!(
            Request::parse(&[PROBE, 0, 0, 0, 7, 0, 0, 0]),
            Ok(Request::Probe { endpoint: 7 })
        );
        for kind in [0, 6, 0xff] {
            assert_eq!(Request::parse(&[kind; 72]), Err(Status::Unsupported));
        }
        let mut attach = [0; 20];
        attach[0] = ATTACH;
        attach[12] = 2;
        assert_eq!(Request::parse(&attach), Err(Status::Invalid));
        attach[12] = 1;
        let bypass = Request::Attach { domain: 0, endpoint: 0, bypass: true };
        assert_eq!(Request::parse(&attach), Ok(bypass));
    }

    #[test]
    fn properties_and_faults_are_laid_out_as_the_standard_says() {
        let properties = properties();
        assert_eq!(properties[..8], [1, 0, 20, 0, 1, 0, 0, 0]);
        assert_eq!(
            properties[8..24],
            [0, 0, 0xe0, 0xfe, 0, 0, 0, 0, 0xff, 0xff, 0xef, 0xfe, 0, 0, 0, 0]
        );
        assert!(properties[24..].iter().all(|byte| *byte == 0));
        let fault = Fault { endpoint: 0x1_0018, address: 0x1234, access: 1, in_domain: true };
        assert_eq!(
            fault_report(fault),
            [2, 0, 0, 0, 1, 1, 0, 0, 0x18, 0, 1, 0, 0, 0, 0, 0, 0x34, 0x12, 0, 0, 0, 0, 0, 0]
        );
        let fault = Fault { access: 3, in_domain: false, ..fault };
        assert_eq!(fault_report(fault)[..8], [1, 0, 0, 0, 2, 1, 0, 0]);
    }

    /// A request as a driver writes it.
    fn written(request: Request) -> Vec<u8> {
        let small = |numbers: &[u32]| numbers.iter().flat_map(|it| it.to_le_bytes()).collect();
        let large = |numbers: &[u64]| numbers.iter().flat_map(|it| it.to_le_bytes()).collect();
        let parts: [Vec<u8>; 4] = match request {
            Request::Attach { domain, endpoint, bypass } => {
                [small(&[1, domain, endpoint, bypass.into(), 0]), vec![], vec![], vec![]]
            }
            Request::Detach { domain, endpoint } => {
                [small(&[2, domain, endpoint, 0, 0]), vec![], vec![], vec![]]
            }
            Request::Map { domain, first, last, gpa, flags } => {
                [small(&[3, domain]), large(&[first, last, gpa]), small(&[flags]), vec![]]
            }
            Request::Unmap { domain, first, last } => {
                [small(&[4, domain]), large(&[first, last]), small(&[0]), vec![]]
            }
            Request::Probe { endpoint } => [small(&[5, endpoint]), vec![], vec![], vec![]],
        };
        parts.concat()
    }

    proptest! {
        /// What is taken says what the bytes say, and what is refused has its reason: that it ends too early, or a reserved
        /// byte or flag.
        #[test]
        fn any_request_is_taken_as_it_is_written_or_refused(
            kind in 0_u8..8,
            flags in prop_oneof![Just(0_u32), Just(1), any::<u32>()],
            reserved in prop_oneof![Just(0_u32), any::<u32>()],
            mut request in prop::collection::vec(any::<u8>(), 0..80),
        ) {
            let mut put = |at: usize, bytes: &[u8]| {
                request.iter_mut().skip(at).zip(bytes).for_each(|(to, from)| *to = *from);
            };
            put(0, &[kind]);
            if kind == ATTACH {
                put(12, &flags.to_le_bytes());
                put(16, &reserved.to_le_bytes());
            } else if kind == UNMAP {
                put(24, &reserved.to_le_bytes());
            }
            match Request::parse(&request) {
                Ok(read) => {
                    let mut expected = request.clone();
                    // Reserved, and not looked at.
                    expected[1..4].fill(0);
                    if kind == DETACH {
                        expected[12..20].fill(0);
                    }
                    let written = written(read);
                    prop_assert_eq!(Some(&written[..]), expected.get(..written.len()));
                }
                Err(Status::Unsupported) => prop_assert!(!(1..=5).contains(&kind)),
                Err(Status::Invalid) => {
                    let len_bytes = [1, 20, 20, 36, 28, 8, 1, 1][usize::from(kind)];
                    let is_odd = kind == ATTACH && (flags > 1 || reserved != 0)
                        || kind == UNMAP && reserved != 0;
                    prop_assert!(request.len() < len_bytes || is_odd, "{:?}", request);
                }
                Err(other) => prop_assert!(false, "{:?}", other),
            }
        }
    }
}
