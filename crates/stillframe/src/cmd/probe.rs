//! `probe`: tests whether this machine's kernel can do what stillframe needs.

use serde_json::{Value, json};
use stillframe_engine::probe::{self, Ability, Need, State};

use super::Context;
use crate::error::CommandError;
use crate::table::{Align, Table};

/// Tests every ability.
///
/// # Errors
/// A required ability is missing.
pub fn run(context: &Context) -> anyhow::Result<()> {
    let abilities = probe::run();
    let objects: Vec<Value> = abilities.iter().map(object).collect();
    context.console.result(&objects, || words(&abilities))?;
    match missing(&abilities).count() as u64 {
        0 => Ok(()),
        number => Err(CommandError::ProbeFailed(number).into()),
    }
}

/// Checks that this machine can track a VM, before one is touched.
///
/// # Errors
/// A required ability is missing; the error has cause and remedy.
pub fn require() -> Result<(), CommandError> {
    let abilities = probe::run_required();
    let lacks: Vec<String> = missing(&abilities)
        .map(|(name, cause, remedy)| format!("{name} is missing: {cause}; {remedy}"))
        .collect();
    match lacks.is_empty() {
        true => Ok(()),
        false => Err(CommandError::MissingAbility(lacks.join(". "))),
    }
}

fn missing(abilities: &[Ability]) -> impl Iterator<Item = (&str, &str, &str)> {
    abilities
        .iter()
        .filter_map(|ability| match (&ability.need, &ability.state) {
            (Need::Required, State::Missing { cause, remedy }) => {
                Some((ability.name, cause.as_str(), remedy.as_str()))
            }
            _ => None,
        })
}

fn need(ability: &Ability) -> &'static str {
    match ability.need {
        Need::Required => "required",
        Need::Optional => "optional",
    }
}

fn object(ability: &Ability) -> Value {
    let (name, need) = (ability.name, need(ability));
    match &ability.state {
        State::Present { detail } => {
            json!({ "name": name, "need": need, "present": true, "detail": detail })
        }
        State::Missing { cause, remedy } => {
            json!({ "name": name, "need": need, "present": false, "cause": cause, "remedy": remedy })
        }
    }
}

fn words(abilities: &[Ability]) -> String {
    let columns = ["ABILITY", "NEED", "HERE", "DETAIL"].map(|name| (name, Align::Left));
    let mut table = Table::new(&columns);
    for ability in abilities {
        let (here, detail) = match &ability.state {
            State::Present { detail } => ("yes", detail.clone()),
            State::Missing { cause, remedy } => ("NO", format!("{cause}; {remedy}")),
        };
        table.row([ability.name, need(ability), here, &detail].map(str::to_owned));
    }
    table.render()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn abilities() -> Vec<Ability> {
        let missing = || State::Missing {
            cause: "kernel too old".into(),
            remedy: "use 6.7".into(),
        };
        vec![
            Ability {
                name: "ptrace",
                need: Need::Required,
                state: State::Present {
                    detail: "ok".into(),
                },
            },
            Ability {
                name: "page map scan",
                need: Need::Required,
                state: missing(),
            },
            Ability {
                name: "kvm",
                need: Need::Optional,
                state: missing(),
            },
        ]
    }

    #[test]
    fn only_required_abilities_count_as_missing() {
        let abilities = abilities();
        let found: Vec<_> = missing(&abilities).collect();
        assert_eq!(found, [("page map scan", "kernel too old", "use 6.7")]);
    }

    #[test]
    fn cause_and_remedy_are_shown() {
        let words = words(&abilities());
        assert!(
            words.contains("page map scan  required  NO    kernel too old; use 6.7"),
            "{words}"
        );
        assert_eq!(object(&abilities()[2])["remedy"], "use 6.7");
        assert_eq!(object(&abilities()[0])["present"], true);
    }
}
