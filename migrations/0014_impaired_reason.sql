-- Why a reservation is impaired, for people: which node, which GPUs. Empty while it is not.
alter table reservation add column impaired_reason text not null default '';
