//! A pipeline whose VM is migrated, by outcome and by the captures and failures before it.

use super::*;

/// Runs every sequence of choices with this migration; `check` gets what came of each.
fn explore_migration(
    migration: Migration,
    check: impl Fn(&World, Result<Ended, PipelineError<io::Error>>),
) {
    let mut choices = Choices::default();
    let mut migrated = 0;
    loop {
        let world = world(choices);
        world.borrow_mut().migration = Some(migration);
        let ended = try_run(&world, 4, 2 * CAPTURE_BYTES);
        let mut world = Rc::try_unwrap(world).ok().unwrap().into_inner();
        assert!(world.migrated <= 1);
        migrated += world.migrated;
        check(&world, ended);
        choices = std::mem::take(&mut world.choices);
        if !choices.advance() {
            break;
        }
    }
    assert!(migrated > 0, "{migration:?}");
}

/// The migration that is wanted before the first of the four captures, or after each of the others.
fn migrations(outcome: Outgoing) -> impl Iterator<Item = Migration> {
    (0..4).map(move |after| Migration { after, outcome })
}

#[test]
fn a_migrated_vm_ends_the_pipeline() {
    for migration in migrations(Outgoing::Away) {
        explore_migration(migration, |world, ended| {
            let ended = ended.unwrap();
            assert_eq!(ended.taken, world.taken);
            assert_eq!(ended.why == End::Migrated, world.migrated == 1);
            assert!(world.migrated == 0 || !world.exited);
        });
    }
}

#[test]
fn a_migration_that_does_not_begin_changes_nothing() {
    for migration in migrations(Outgoing::Attached) {
        explore_migration(migration, |world, ended| {
            let ended = ended.unwrap();
            if world.choices.faults == 0 {
                assert_eq!((ended.why, ended.taken), (End::Count, 4));
                assert_eq!((world.attached, world.whole), (1, 1));
            }
        });
    }
}

#[test]
fn after_a_failed_migration_the_next_checkpoint_is_whole() {
    for migration in migrations(Outgoing::Here) {
        explore_migration(migration, |world, ended| {
            let ended = ended.unwrap();
            if ended.why == End::Count && world.migrated == 1 {
                assert!(world.attached >= 2);
                assert_eq!(world.committed, world.written);
            }
            if world.choices.faults == 0 {
                assert_eq!((ended.why, ended.taken), (End::Count, 4));
                assert_eq!((world.attached, world.whole), (2, 2));
            }
        });
    }
}

#[test]
fn a_pipeline_ends_where_it_is_unclear_where_the_vm_runs() {
    for migration in migrations(Outgoing::Unclear) {
        explore_migration(migration, |world, ended| {
            let unclear = matches!(ended, Err(PipelineError::Environment(_)));
            assert_eq!(unclear, world.migrated == 1);
        });
    }
}
