//! The destination: a new QEMU that is ended if anything fails before the guest runs.

use super::announced::{Greeting, greeting_of};
use super::arriving::{Arriving, Loaded};
use super::error::ReceiveError;
use super::handover::{Destination, Event};
use super::image_files::ImageFiles;
use super::new_qemu::Rehearsal;
use super::receiver::{ReceiveEvent, ReceiveOptions, ReceiveSink, Received};
use super::seed::{Seed, SeedFrom};
use super::takeover::{NewVm, Takeover, TakeoverEvent, Whereabouts};
use super::{Listen, Mode, Wire};
use crate::connection::ConnectionError;
use crate::connection::message::{Control, Message};
use crate::connection::word::Word;

/// Receives a VM over a connection on which nothing was sent yet. `listen` waits for the source to connect again, after
/// the connection was lost. A VM of which there is a checkpoint in `from` begins with that. This returns when the source knows
/// that the VM is here, or does not ask any more, and all its memory is here. After an error the reason is sent to the
/// source, where that is possible.
///
/// # Errors
/// No QEMU is left behind, unless the error says otherwise.
pub fn receive(
    mut wire: Wire,
    listen: Listen<'_>,
    options: &ReceiveOptions,
    from: Option<&mut SeedFrom<'_>>,
    events: ReceiveSink<'_>,
) -> Result<Received, ReceiveError> {
    let message = wire.receive_message();
    if let Ok(Message::Control(Control::Over { .. })) = message {
        return Ok(Received::Nothing);
    }
    let greeted = greeted(&mut wire, message, options, from);
    let (greeting, seed, images) = greeted.inspect_err(|error| give_up(&mut wire, error))?;
    let arriving = Arriving::begin(
        &mut wire,
        listen,
        options,
        (greeting, seed.as_ref(), images),
        events,
    );
    let mut arriving = arriving.inspect_err(|error| give_up(&mut wire, error))?;
    let Greeting { vm, mode, .. } = &arriving.greeting;
    let rehearsal = (*mode == Mode::Rehearsal).then(|| Rehearsal::of(vm, &arriving.launched));
    let late = arriving.late_memory();
    let late = late.inspect_err(|error| give_up(&mut wire, error))?;
    std::thread::scope(|scope| {
        let loaded = late.as_ref().map(|late| late.begin(scope)).transpose();
        let loaded = loaded.and_then(|end| Ok((arriving.load(&mut wire, options.paused)?, end)));
        let (loaded, _end) = loaded.inspect_err(|error| give_up(&mut wire, error))?;
        if let Some(rehearsal) = rehearsal {
            rehearsed(loaded, &mut wire)?;
            return Ok(Received::Rehearsed(rehearsal));
        }
        let Loaded {
            launched,
            guardian,
            record,
            mut report,
            images,
            lanes: _lanes,
        } = loaded;
        // Whatever happens to this process, the VM may run on them.
        let images = images.keep();
        let runs = record.content().runs;
        let late = late.as_ref().map(|late| late.running(scope, runs));
        let mut events = |event: TakeoverEvent<'_>| match event {
            TakeoverEvent::Arrived(_, running) => {
                report.running = running;
                events(ReceiveEvent::Arrived(&report));
            }
            other => pass_on(other, events),
        };
        let vm = (NewVm::Launched(launched), Some(guardian));
        let mut takeover = Takeover::new(vm, record, (Some(wire), listen), late, &mut events);
        let whereabouts = takeover.decide(Destination::Receiving.step(Event::Loaded));
        if let Whereabouts::NotHere { .. } = whereabouts {
            images.remove();
        }
        result(whereabouts)?;
        takeover.finish()?;
        Ok(Received::Over)
    })
}

/// What the source says first, the checkpoint that the VM begins with, and the images that both hosts have.
fn greeted<'r>(
    wire: &mut Wire,
    message: Result<Message, ConnectionError>,
    options: &ReceiveOptions,
    from: Option<&'r mut SeedFrom<'_>>,
) -> Result<(Greeting, Option<Seed<'r>>, ImageFiles), ReceiveError> {
    let greeting = greeting_of(message?)?;
    let Greeting {
        vm, blocks, base, ..
    } = &greeting;
    // Pages that are fetched come at once, whatever is here.
    let from = from.filter(|_| greeting.connections > 0);
    let seed = from.map(|from| Seed::find(from, vm, blocks, base.as_ref()));
    let seed = seed.transpose()?.flatten();
    let based = seed.as_ref().is_some_and(|seed| seed.base.is_some());
    let seeded = seed.is_some() && !based;
    let files = ImageFiles::open(&greeting.images, &options.shared_images);
    let images = files.there();
    wire.send_control(&Control::Begun {
        seeded,
        based,
        images,
    })?;
    Ok((greeting, seed, files))
}

/// The device state is loaded: ends the QEMU.
fn rehearsed(loaded: Loaded, wire: &mut Wire) -> Result<(), ReceiveError> {
    wire.send_control(&Control::Fetched)?;
    loaded.record.remove()?;
    // The next QEMU is started in the same place.
    drop(loaded);
    Ok(wire.send_control(&Control::Rehearsed)?)
}

/// Reports what becomes of a VM that has arrived.
pub(super) fn pass_on(event: TakeoverEvent<'_>, events: ReceiveSink<'_>) {
    match event {
        TakeoverEvent::Arrived(..) => {}
        TakeoverEvent::Filled(report) => events(ReceiveEvent::Filled(report)),
        TakeoverEvent::Supervised(supervised) => events(ReceiveEvent::Supervised(supervised)),
        TakeoverEvent::Progress(progress) => events(ReceiveEvent::Progress(progress)),
    }
}

/// Tells the source why. If it cannot be informed any more, it sees that the connection ends.
fn give_up(wire: &mut Wire, error: &ReceiveError) {
    let why = Some(crate::in_words(error));
    let word = Word::Never;
    let _ = wire.send_control(&Control::Word { word, why });
}

/// An error, unless the VM is here.
pub(super) fn result(whereabouts: Whereabouts) -> Result<(), ReceiveError> {
    match whereabouts {
        Whereabouts::Here => Ok(()),
        Whereabouts::NotHere { why } => Err(ReceiveError::NotHere { why }),
        Whereabouts::Unclear { why } => Err(ReceiveError::Unclear { why }),
        Whereabouts::Lacks { why } => Err(ReceiveError::Lacks { why }),
    }
}
