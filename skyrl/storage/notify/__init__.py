"""Notices from process to process that something in the database has changed.

A notice is an id or one of two fixed words. It says only what to read; the facts are in the database. A notice may be
lost (the receiver does not run, a buffer is full, a connection broke). Therefore every receiver also reads the database
at regular times, and a lost notice only costs the time until then.

Between the processes of one server, over doorbells (datagram sockets on one machine):

- An API process rings the engine without a notice for new commands, and with `SESSIONS` when a session has ended.
- The engine sends each API process the ids of requests that it has settled. The API process then reads their outcomes.
- The engine sends `STATE` when its own state has changed. The API process then reads that state.

Between the API processes of one database (`peers`), over PostgreSQL (`postgres`). On SQLite there is only one:

- ids of requests that have ended: the other processes read their outcomes and stop forwarding them;
- ids of sampling sessions in which a sample has ended: the other processes read the new ends for waiting polls;
- ids of sessions that have ended or changed: the other processes read those sessions.

An API process has one `Notifier` for all of this. These constants say how often each receiver reads the database:
`engine.loop.SAFETY_POLL_S` in the engine; in an API process `futures.store.SAFETY_POLL_S` for requests,
`futures.stored_ends.SAFETY_READ_S` for polls, `api.readiness.POLL_S` for the engine's state, and
`api.background.SESSION_CHECK_S` for sessions.
"""
