// Memories on the chip. A row that is read and written in one cycle gives what was there before.

// One read port, one write port; the row read is there in the next cycle.
module npu_sram #(
    parameter int ROWS  = 32,
    parameter int WIDTH = 32,
    parameter int BITS  = $clog2(ROWS)
) (
    input  logic             clk,
    input  logic             read,
    input  logic [BITS-1:0]  read_row,
    output logic [WIDTH-1:0] q,
    input  logic             write,
    input  logic [BITS-1:0]  write_row,
    input  logic [WIDTH-1:0] d
);
  logic [WIDTH-1:0] rows[0:ROWS-1];
  initial for (int i = 0; i < ROWS; i = i + 1) rows[i] = {WIDTH{1'b0}};
  always_ff @(posedge clk) begin
    if (read) q <= rows[read_row];
    if (write) rows[write_row] <= d;
  end
endmodule

// Banks with two readers, which name different banks in one cycle, and one writer.
module npu_scratchpad #(
    parameter int BANKS     = 4,
    parameter int BANK_ROWS = 32,
    parameter int WIDTH     = 32,
    parameter int BITS      = $clog2(BANKS * BANK_ROWS)
) (
    input  logic             clk,
    input  logic             first,
    input  logic [BITS-1:0]  first_row,
    output logic [WIDTH-1:0] first_q,
    input  logic             second,
    input  logic [BITS-1:0]  second_row,
    output logic [WIDTH-1:0] second_q,
    input  logic             write,
    input  logic [BITS-1:0]  write_row,
    input  logic [WIDTH-1:0] d
);
  localparam int ROW = $clog2(BANK_ROWS);
  localparam int BANK = BITS - ROW;
  wire [BANKS*WIDTH-1:0] q;
  logic [BANK-1:0] first_bank, second_bank;
  always_ff @(posedge clk) begin
    if (first) first_bank <= first_row[BITS-1:ROW];
    if (second) second_bank <= second_row[BITS-1:ROW];
  end
  assign first_q = q[first_bank*WIDTH+:WIDTH];
  assign second_q = q[second_bank*WIDTH+:WIDTH];
  genvar b;
  generate
    for (b = 0; b < BANKS; b = b + 1) begin : g_bank
      localparam logic [BANK-1:0] HERE = b;
      logic by_first, by_second;
      assign by_first = first && first_row[BITS-1:ROW] == HERE;
      assign by_second = second && second_row[BITS-1:ROW] == HERE;
      npu_sram #(.ROWS(BANK_ROWS), .WIDTH(WIDTH)) sram (
          .clk(clk), .read(by_first || by_second),
          .read_row(by_first ? first_row[ROW-1:0] : second_row[ROW-1:0]), .q(q[b*WIDTH+:WIDTH]),
          .write(write && write_row[BITS-1:ROW] == HERE), .write_row(write_row[ROW-1:0]), .d(d));
`ifdef FORMAL
      logic ready;
      initial ready = 1'b0;
      always_ff @(posedge clk) ready <= 1'b1;
      always_ff @(posedge clk) if (ready) assert (!(by_first && by_second));
`endif
    end
  endgenerate
endmodule

// Rows of sums: two readers have a copy each. A written row is `d`, or `d` added to the row that
// the first reader asked for in the cycle before.
module npu_accumulator #(
    parameter int ROWS     = 32,
    parameter int COLUMNS  = 4,
    parameter int FLOATING = 0,
    parameter int BITS     = $clog2(ROWS)
) (
    input  logic                  clk,
    input  logic                  read,
    input  logic [BITS-1:0]       read_row,
    output logic [COLUMNS*32-1:0] q,
    input  logic                  store,
    input  logic [BITS-1:0]       store_row,
    output logic [COLUMNS*32-1:0] store_q,
    input  logic                  write,
    input  logic                  add,
    input  logic [BITS-1:0]       write_row,
    input  logic [COLUMNS*32-1:0] d
);
  wire [COLUMNS*32-1:0] total, data;
  genvar c;
  generate
    for (c = 0; c < COLUMNS; c = c + 1) begin : g_add
      npu_add #(.FLOATING(FLOATING)) adder (.a(q[c*32+:32]), .b(d[c*32+:32]), .y(total[c*32+:32]));
    end
  endgenerate
  assign data = add ? total : d;
  npu_sram #(.ROWS(ROWS), .WIDTH(COLUMNS * 32)) copy_execute (
      .clk(clk), .read(read), .read_row(read_row), .q(q),
      .write(write), .write_row(write_row), .d(data));
  npu_sram #(.ROWS(ROWS), .WIDTH(COLUMNS * 32)) copy_store (
      .clk(clk), .read(store), .read_row(store_row), .q(store_q),
      .write(write), .write_row(write_row), .d(data));
endmodule
