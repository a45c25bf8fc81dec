package consumer

// ServerURL is the PostgreSQL of this package's tests, for its examples.
func ServerURL() string { return server.URL }
