//! Layers over a page table: merged in time, and always with the memory that they encode.

use stillframe_page::delta::{DeltaEncoder, EncodedDelta};

use super::support::{Dice, PAGE, Vm, WAIT, compare_one_by_one, init, keep_last, open, test_dir};
use crate::page_table::table::PageRef;
use crate::{BlockTable, PageTableBuilder, RepoError, Repository, Written};

/// Long enough that layers of every level are merged, twice into the table.
#[test]
fn a_long_watch_has_few_layers_and_every_version() {
    let dir = test_dir();
    let mut repo = init(dir.path());
    let mut dice = Dice(11);
    let mut vm = Vm::new("vm", 1100);
    vm.run(&mut dice, 900);
    let mut kept = Vec::new();
    let mut levels = [0; 3];
    let mut roots = std::collections::BTreeSet::new();
    for round in 0..600 {
        vm.run(&mut dice, 4);
        let id = vm.checkpoint(&mut repo).unwrap();
        let ram = &repo.manifest(&id).unwrap().ram[0];
        assert!(ram.layers.len() <= 33, "{}", ram.layers.len());
        for layer in &ram.layers {
            levels[usize::from(layer.level)] += 1;
        }
        roots.insert(ram.root);
        if round % 37 == 0 || round > 590 {
            kept.push((id, vm.clone()));
        }
    }
    assert!(levels.iter().all(|&layers| layers > 0), "{levels:?}");
    // The first table, and one for each time all layers were merged.
    assert_eq!(roots.len(), 3);
    for (id, vm) in &kept {
        assert!(vm.compare(&mut repo, id).unwrap());
        assert!(compare_one_by_one(vm, &mut repo, id, &mut dice, 15) > 0);
    }
    // The last checkpoint needs packs of all ages; prune must keep them.
    let forget = keep_last(1);
    repo.forget(&forget).unwrap();
    repo.prune(false, &mut |_| {}).unwrap();
    let mut repo = open(dir.path());
    assert_eq!(repo.check(true, &mut |_| {}).unwrap().problems, []);
    assert!(vm.compare(&mut repo, &kept[kept.len() - 1].0).unwrap());
}

/// Without a written page there is nothing to merge, and no layer.
#[test]
fn an_idle_checkpoint_adds_no_layer() {
    let dir = test_dir();
    let mut repo = init(dir.path());
    let mut vm = Vm::new("vm", 20);
    vm.run(&mut Dice(1), 10);
    vm.checkpoint(&mut repo).unwrap();
    for _ in 0..3 {
        vm.run(&mut Dice(2), 0);
        let id = vm.checkpoint(&mut repo).unwrap();
        assert_eq!(repo.manifest(&id).unwrap().ram[0].layers, []);
        assert!(vm.compare(&mut repo, &id).unwrap());
    }
}

fn edit(
    repo: &mut Repository,
    after: Option<&BlockTable>,
    what: impl FnOnce(&mut PageTableBuilder, &mut crate::Writer<'_>),
) -> Result<Written, RepoError> {
    let mut writer = repo.begin(WAIT).unwrap();
    let mut memory = match after {
        Some(table) => PageTableBuilder::after(table),
        None => PageTableBuilder::new(10),
    };
    what(&mut memory, &mut writer);
    memory.finish(&mut writer)
}

fn delta(pages: &[u32]) -> EncodedDelta {
    let mut encoder = DeltaEncoder::new(1).unwrap();
    for &page in pages {
        encoder.add(page, [&[0; PAGE], &[1; PAGE]], PAGE);
    }
    encoder.finish().unwrap()
}

#[test]
fn a_page_table_builder_refuses_inconsistent_input() {
    let dir = test_dir();
    let mut repo = init(dir.path());
    let mut vm = Vm::new("vm", 10);
    let id = vm.checkpoint(&mut repo).unwrap();
    let table = repo.manifest(&id).unwrap().ram[0].clone();
    let refused = |found: Result<Written, RepoError>, word: &str| match found {
        Err(RepoError::Table { what }) => assert!(what.contains(word), "{what}"),
        other => panic!("{other:?}"),
    };
    let after = Some(&table);
    let outside = edit(&mut repo, after, |memory, _| memory.set(10, PageRef::Zero));
    refused(outside, "outside");
    let far = edit(&mut repo, after, |memory, _| {
        memory.set(1 << 40, PageRef::Zero)
    });
    refused(far, "outside");
    let beyond = edit(&mut repo, after, |memory, writer| {
        memory.add_delta(writer, delta(&[3, 10])).unwrap();
    });
    refused(beyond, "outside");
    let twice = edit(&mut repo, after, |memory, writer| {
        memory.add_delta(writer, delta(&[3, 5])).unwrap();
        memory.add_delta(writer, delta(&[4])).unwrap();
    });
    refused(twice, "same page");
    let nothing_below = edit(&mut repo, None, |memory, writer| {
        memory.add_delta(writer, delta(&[3])).unwrap();
    });
    refused(nothing_below, "follow");
    // The order does not matter, and the last content counts.
    let fine = edit(&mut repo, after, |memory, writer| {
        memory.add_delta(writer, delta(&[7])).unwrap();
        memory.add_delta(writer, delta(&[3, 5])).unwrap();
        memory.add_delta(writer, delta(&[])).unwrap();
        let id = writer.put_unnamed(&[9; PAGE]).unwrap();
        memory.set(8, PageRef::Stored(id));
        memory.set(1, PageRef::Zero);
        memory.set(8, PageRef::Zero);
    });
    assert_eq!(fine.unwrap().layers.len(), 1);
}
