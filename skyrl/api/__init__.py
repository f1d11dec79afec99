"""The Tinker API: an API process answers HTTP requests, records them, forwards samples, and answers polls.

`routes` has the handlers, `ui` the status page, `request_status` why a request still waits. Knows HTTP, the services
and the database's classes; knows no SQL, no model and no trainer."""
