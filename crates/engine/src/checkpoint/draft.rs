//! What is collected on the way to a manifest.

use std::collections::BTreeMap;

use stillframe_qemu::record::VmRecord;
use stillframe_repo::{Manifest, MemoryEditor, RamTable, Writer};
use stillframe_sys::affinity::Processors;

use super::{CheckpointError, CheckpointOptions, Copied, DEVICE_STATE, Phases};
use crate::attach::{Parent, Vm};
use crate::capture::block::PAGE_BYTES;
use crate::capture::ingest::Ingested;
use crate::capture::tracker::Tracked;
use crate::capture::{DowntimeRecord, aside};
use crate::verify::Image;

/// A checkpoint under way.
pub struct Draft {
    pub record: VmRecord,
    pub parent: Option<Parent>,
    pub ingested: Ingested,
    /// Where storing runs.
    pub aside: Processors,
    pub missing_packs: Vec<String>,
    pub copied: Copied,
    pub phases: Phases,
}

/// What the pause brought home.
pub struct Paused {
    pub downtime: DowntimeRecord,
    pub time: jiff::Timestamp,
    pub device_state: Vec<u8>,
    pub image: Option<Image>,
}

impl Draft {
    /// Decides whether this is an increment. The writer's lock keeps the parent from being pruned
    /// from here on; but the parent must not need what the repository has lost since.
    pub fn begin(
        vm: &mut Vm,
        writer: &Writer<'_>,
        repository_id: &str,
        options: &CheckpointOptions,
    ) -> Result<Draft, CheckpointError> {
        let record = match vm.record.take() {
            Some(mut record) => {
                record.refresh(&mut vm.monitor)?;
                record
            }
            None => VmRecord::take(&vm.target, &mut vm.monitor)?,
        };
        vm.record = Some(record.clone());
        let missing_packs = writer.missing_packs();
        let parent = match vm.parent.clone() {
            Some(parent)
                if parent.repository == repository_id
                    && missing_packs
                        .iter()
                        .all(|pack| parent.missing_packs.contains(pack))
                    && writer.has_manifest(&parent.id)? =>
            {
                Some(parent)
            }
            _ => None,
        };
        // A full pass forgets what was pending against the old parent, so it can be none any more,
        // not even when the full pass fails; nor can what is known of it.
        vm.parent = parent.clone();
        let memory = match &parent {
            Some(parent) => parent.tables.iter().map(MemoryEditor::after).collect(),
            None => {
                vm.cache.clear();
                let blocks = vm.tracker.blocks().iter();
                blocks
                    .map(|tracked| MemoryEditor::new(tracked.block.pages()))
                    .collect()
            }
        };
        Ok(Draft {
            record,
            ingested: Ingested::new(
                memory,
                &vm.tracker,
                writer.hasher().clone(),
                parent.is_some(),
                options.dedup,
            ),
            parent,
            aside: aside::processors(&vm.target.process),
            missing_packs,
            copied: Copied::default(),
            phases: Phases::default(),
        })
    }

    /// The times of all steps.
    pub fn phases(&self) -> Phases {
        Phases {
            judge: self.ingested.judging.as_micros() as u64,
            write: self.ingested.writing.as_micros() as u64,
            ..self.phases
        }
    }

    /// Stores what the pages are and the device state, and describes it all.
    pub fn manifest(
        &mut self,
        blocks: &[Tracked],
        writer: &mut Writer<'_>,
        paused: &Paused,
    ) -> Result<Manifest, CheckpointError> {
        let mut ram = Vec::with_capacity(blocks.len());
        for (tracked, memory) in blocks.iter().zip(self.ingested.take_memory()) {
            let written = memory.finish(writer)?;
            ram.push(RamTable {
                name: tracked.block.name().to_owned(),
                page_bytes: PAGE_BYTES as u32,
                pages: tracked.block.pages(),
                root: written.root,
                layers: written.layers,
            });
        }
        let stream = writer.put_whole_stream(&paused.device_state)?;
        Ok(Manifest {
            vm: self.record.label.clone(),
            time: paused.time,
            parent: self.parent.as_ref().map(|parent| parent.id),
            ram,
            streams: BTreeMap::from([(DEVICE_STATE.to_owned(), stream)]),
            pages: self.ingested.counts,
            bytes_stored: writer.bytes_stored(),
            vm_record: serde_json::to_value(&self.record).map_err(CheckpointError::Encode)?,
            downtime_us: serde_json::to_value(paused.downtime).map_err(CheckpointError::Encode)?,
        })
    }
}
