package consumer

import (
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/kafkaonce/kafkaonce/failure"
)

// note keeps the first SQL error of the message: what a handler returns may
// hide a deadlock, and a deadlock is nobody's failure.
func (m *messageTx) note(err error) {
	if err != nil && m.sqlErr == nil && failure.SQLState(err) != "" {
		m.sqlErr = err
	}
}

type notedRow struct {
	pgx.Row
	m *messageTx
}

func (r notedRow) Scan(dest ...any) error {
	err := r.Row.Scan(dest...)
	r.m.note(err)
	return err
}

type notedRows struct {
	pgx.Rows
	m *messageTx
}

func (r notedRows) Err() error {
	err := r.Rows.Err()
	r.m.note(err)
	return err
}

func (r notedRows) Scan(dest ...any) error {
	err := r.Rows.Scan(dest...)
	r.m.note(err)
	return err
}

// failedRows is a result that was never asked for.
type failedRows struct{ err error }

func (r failedRows) Close()                                       {}
func (r failedRows) Err() error                                   { return r.err }
func (r failedRows) CommandTag() pgconn.CommandTag                { return pgconn.CommandTag{} }
func (r failedRows) FieldDescriptions() []pgconn.FieldDescription { return nil }
func (r failedRows) Next() bool                                   { return false }
func (r failedRows) Scan(...any) error                            { return r.err }
func (r failedRows) Values() ([]any, error)                       { return nil, r.err }
func (r failedRows) RawValues() [][]byte                          { return nil }
func (r failedRows) Conn() *pgx.Conn                              { return nil }
func (r failedRows) TypeMap() *pgtype.Map                         { return nil }
