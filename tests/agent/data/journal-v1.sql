-- A journal as version 1 left it: one command done, one under way.
BEGIN TRANSACTION;
CREATE TABLE command (
        command_id text    primary key,
        sequence   integer not null unique,
        kind       text    not null,
        state      text    not null check (state in ('recorded', 'done', 'indeterminate')),
        result     blob,
        check ((state = 'done') = (result is not null))
    ) strict;
INSERT INTO "command" VALUES('cmd_done',1,'diag.nvml','done',X'706173736564');
INSERT INTO "command" VALUES('cmd_cut',3,'diag.nvml','recorded',NULL);
CREATE TABLE desired (
        only        integer primary key check (only = 1),
        incarnation integer not null,
        generation  integer not null,
        envelope    blob    not null
    ) strict;
INSERT INTO "desired" VALUES(1,1,7,X'73706563');
CREATE TABLE identity (
        only       integer primary key check (only = 1),
        journal_id text    not null,
        sequence   integer not null
    ) strict;
INSERT INTO "identity" VALUES(1,'jrn_01kb2v4m9q0000000000000001',7);
CREATE TABLE report (
        slot     text    primary key,
        sequence integer not null unique,
        key      text    not null,
        kind     text    not null,
        envelope blob    not null
    ) strict;
INSERT INTO "report" VALUES('alloc_1',7,'key','allocation_bound',X'7369676E6564');
CREATE INDEX report_key on report (key);
COMMIT;
pragma user_version = 1;
