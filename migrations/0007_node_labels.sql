-- Labels of nodes, and the selectors by which reservations name the nodes that they may be on. The words are checked
-- by controlplane/model/labels.py; what is bounded here is how much of them a row holds.

alter table node add column labels jsonb not null default '{}'
  check (jsonb_typeof(labels) = 'object' and length(labels::text) <= 8192);
alter table reservation add column selector text[] not null default '{}'
  check (cardinality(selector) <= 8);

-- A placement that was planned with other labels loses.
create trigger node_placement_gen_labels before update on node for each row
  when (old.labels is distinct from new.labels) execute function node_bump_placement_gen();
