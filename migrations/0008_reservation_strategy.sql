-- Whether a reservation fills nodes that are in use before it begins another, or takes the emptiest.
alter table reservation add column strategy text not null default 'pack' check (strategy in ('pack', 'spread'));
