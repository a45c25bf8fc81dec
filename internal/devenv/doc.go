// Package devenv starts what the demo and the tests need: a PostgreSQL of
// their own, Kafka in process or for real, and things that break them. No
// library package imports it.
//
// Every server listens on loopback only, has its own data directory and port,
// and ends when the process that started it ends, also by SIGKILL: a small
// shell holds a pipe of ours and ends the server when the pipe closes.
package devenv
