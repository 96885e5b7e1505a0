//! The features of the guest's processors, as the guest sees them (CPUID).
//!
//! A guest queries them once and relies on them ever after. Restored where a feature is missing, it crashes at some
//! later instruction. Source: QEMU, `qapi/machine-target.json` (`X86CPUFeatureWordInfo`); names: Intel SDM, volume
//! 2, CPUID.

use serde::{Deserialize, Serialize};

/// One register of one leaf of CPUID.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FeatureWord {
    /// The leaf.
    #[serde(rename = "cpuid-input-eax")]
    pub leaf: u32,
    /// Its subleaf, where it has several.
    #[serde(rename = "cpuid-input-ecx", default)]
    pub subleaf: u32,
    /// The register, such as `EDX`.
    #[serde(rename = "cpuid-register")]
    pub register: String,
    /// A bit for each feature.
    pub features: u32,
}

/// Features that programs use without asking again, by leaf, subleaf, register and bit.
const NAMES: &[(u32, u32, &str, u32, &str)] = &[
    (1, 0, "ECX", 0, "sse3"),
    (1, 0, "ECX", 1, "pclmulqdq"),
    (1, 0, "ECX", 9, "ssse3"),
    (1, 0, "ECX", 12, "fma"),
    (1, 0, "ECX", 17, "pcid"),
    (1, 0, "ECX", 19, "sse4.1"),
    (1, 0, "ECX", 20, "sse4.2"),
    (1, 0, "ECX", 21, "x2apic"),
    (1, 0, "ECX", 22, "movbe"),
    (1, 0, "ECX", 23, "popcnt"),
    (1, 0, "ECX", 24, "tsc-deadline"),
    (1, 0, "ECX", 25, "aes"),
    (1, 0, "ECX", 26, "xsave"),
    (1, 0, "ECX", 28, "avx"),
    (1, 0, "ECX", 29, "f16c"),
    (1, 0, "ECX", 30, "rdrand"),
    (7, 0, "EBX", 0, "fsgsbase"),
    (7, 0, "EBX", 3, "bmi1"),
    (7, 0, "EBX", 5, "avx2"),
    (7, 0, "EBX", 7, "smep"),
    (7, 0, "EBX", 8, "bmi2"),
    (7, 0, "EBX", 9, "erms"),
    (7, 0, "EBX", 10, "invpcid"),
    (7, 0, "EBX", 16, "avx512f"),
    (7, 0, "EBX", 18, "rdseed"),
    (7, 0, "EBX", 19, "adx"),
    (7, 0, "EBX", 20, "smap"),
    (7, 0, "EBX", 29, "sha-ni"),
    (7, 0, "ECX", 2, "umip"),
    (7, 0, "ECX", 3, "pku"),
    (7, 0, "ECX", 9, "vaes"),
    (0x8000_0001, 0, "ECX", 5, "abm"),
    (0x8000_0001, 0, "EDX", 26, "pdpe1gb"),
    (0x8000_0001, 0, "EDX", 27, "rdtscp"),
];

/// Whether a guest with these features can run guests itself: VMX or SVM.
pub(crate) fn runs_guests(features: &[FeatureWord]) -> bool {
    let has = |leaf, bit: u32| {
        features.iter().any(|word| {
            word.leaf == leaf && word.register == "ECX" && word.features >> bit & 1 == 1
        })
    };
    has(1, 5) || has(0x8000_0001, 2)
}

/// The features of `then` that are not in `now`, in words.
pub(crate) fn missing(then: &[FeatureWord], now: &[FeatureWord]) -> Vec<String> {
    let mut missing = Vec::new();
    for word in then {
        let same = |other: &&FeatureWord| {
            (other.leaf, other.subleaf, &other.register)
                == (word.leaf, word.subleaf, &word.register)
        };
        let there = now.iter().find(same).map_or(0, |other| other.features);
        let bits = word.features & !there;
        missing.extend(
            (0..u32::BITS)
                .filter(|bit| bits >> bit & 1 == 1)
                .map(|bit| word.name(bit)),
        );
    }
    missing
}

impl FeatureWord {
    fn name(&self, bit: u32) -> String {
        let place = (self.leaf, self.subleaf, self.register.as_str(), bit);
        let known = NAMES
            .iter()
            .find(|&&(leaf, subleaf, register, bit, _)| (leaf, subleaf, register, bit) == place);
        match known {
            Some((.., name)) => (*name).to_owned(),
            None => format!(
                "CPUID {:#x}.{} {} bit {bit}",
                self.leaf, self.subleaf, self.register
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn word(leaf: u32, register: &str, features: u32) -> FeatureWord {
        FeatureWord {
            leaf,
            subleaf: 0,
            register: register.to_owned(),
            features,
        }
    }

    #[test]
    fn who_runs_guests() {
        assert!(runs_guests(&[word(1, "EDX", 0), word(1, "ECX", 1 << 5)]));
        assert!(runs_guests(&[word(0x8000_0001, "ECX", 1 << 2)]));
        assert!(!runs_guests(&[
            word(1, "EDX", 1 << 5),
            word(1, "ECX", 1 << 2)
        ]));
    }

    #[test]
    fn what_is_missing_has_a_name() {
        let then = [word(1, "ECX", 1 << 28 | 1), word(6, "EAX", 4)];
        assert_eq!(missing(&then, &then), Vec::<String>::new());
        assert_eq!(
            missing(&then, &[word(1, "ECX", 1)]),
            ["avx", "CPUID 0x6.0 EAX bit 2"]
        );
        // More than there was is no harm.
        assert!(missing(&then[..1], &[word(1, "ECX", u32::MAX)]).is_empty());
    }
}
