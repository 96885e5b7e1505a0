//! Ids in JSON: 64 hexadecimal digits.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use stillframe_page::hash::ContentId;

/// Ids as 64 hexadecimal digits in JSON.
#[derive(Clone, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct HexId(pub(crate) ContentId);

impl TryFrom<String> for HexId {
    type Error = &'static str;

    fn try_from(text: String) -> Result<HexId, &'static str> {
        ContentId::from_hex(&text)
            .map(HexId)
            .ok_or("an id that is not 64 hexadecimal digits")
    }
}

impl From<HexId> for String {
    fn from(id: HexId) -> String {
        id.0.to_hex()
    }
}

pub(crate) fn serialize<S: Serializer>(id: &ContentId, to: S) -> Result<S::Ok, S::Error> {
    HexId(*id).serialize(to)
}

pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<ContentId, D::Error> {
    HexId::deserialize(from).map(|id| id.0)
}

/// Lists of ids.
pub(crate) mod ids {
    use super::{ContentId, HexId};
    use serde::{Deserialize, Deserializer, Serializer};

    pub(crate) fn serialize<S: Serializer>(ids: &[ContentId], to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(ids.iter().map(|id| HexId(*id)))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Vec<ContentId>, D::Error> {
        let ids = Vec::<HexId>::deserialize(from)?;
        Ok(ids.into_iter().map(|id| id.0).collect())
    }
}
