"""Telling other processes that something has changed.

A word only says where to look; the database has what is true. So a word may be lost (the hearer is away, a buffer is
full, a connection broke), and every hearer also looks by itself now and then. A lost word costs the time until then.

Between the processes of one server, over the doorbell (datagram sockets on one machine):

- An API process tells the engine of new commands by a ring without a word, and of ended sessions by `SESSIONS`.
- The engine tells each API process the ids of requests that it has settled, which then reads their outcomes; and by
  `STATE` that its own state has changed, which the API process then reads.

Between the API processes of one database (`peers`), over PostgreSQL (`postgres`); on SQLite an API process is alone:

- ids of requests that have ended: the others read their outcomes, and stop forwarding those requests;
- ids of sampling sessions of which a sample has ended: the others let the polls for all their samples read on;
- ids of sessions that have ended or changed: the others read them.

An API process builds one `Notifier` for all of this. Every hearer's own looks are named constants: of the engine
`engine.loop.SAFETY_POLL_S`; of an API process `futures.store.SAFETY_POLL_S` for requests, `futures.stored_ends.LOOK_S`
for polls, `api.readiness.POLL_S` for the engine's state, and `api.background.SESSION_CHECK_S` for sessions.
"""
