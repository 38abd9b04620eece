// Benches of the formal proofs; read with FORMAL defined, no part of the chip.

// No bank of the scratchpad is read twice in a cycle: the execute unit with sums in place, given
// instructions as the program check lets pass (each operand within one bank, not the same).
module npu_prove_ports (
    input logic clk,
    input logic valid,
    input logic [127:0] head
);
  localparam int BITS = 5;  // 4 banks of 8 rows
  logic started;
  initial started = 1'b0;
  always_ff @(posedge clk) started <= 1'b1;
  wire rst = !started;
  logic pop, begins, runs, done, first_read, second_read;
  logic [127:0] word;
  logic [BITS-1:0] first_row, second_row;
  wire [3:0] none;
  wire [1:0] state;
  npu_issue #(.NUMBER(1)) issue (
      .clk(clk), .rst(rst), .valid(valid), .head(head), .pop(pop), .prev_ready(1'b1),
      .next_ready(1'b1), .prev_take(none[0]), .next_take(none[1]), .prev_room(1'b1),
      .next_room(1'b1), .prev_put(none[2]), .next_put(none[3]), .begins(begins), .runs(runs),
      .done(done), .state(state), .word(word));
  logic [31:0] first_q, second_q;
  npu_scratchpad #(.BANKS(4), .BANK_ROWS(8), .WIDTH(32)) scratchpad (
      .clk(clk), .first(first_read), .first_row(first_row), .first_q(first_q),
      .second(second_read), .second_row(second_row), .second_q(second_q),
      .write(1'b0), .write_row(5'd0), .d(32'd0));
  wire sum_read, write, add;
  wire [1:0] sum_row, write_row;
  wire [63:0] d;
  npu_execute #(
      .ROWS(2), .COLUMNS(2), .SLOTS(4), .ELEMENT(8), .SUMS_STAY(1), .LANES(1),
      .SCRATCH_ROW(BITS), .SUM_ROW(2)
  ) execute (
      .clk(clk), .rst(rst), .begins(begins), .runs(runs), .word(word), .done(done),
      .first_read(first_read), .first_row(first_row), .first_q(first_q),
      .second_read(second_read), .second_row(second_row), .second_q(second_q),
      .sum_read(sum_read), .sum_row(sum_row), .sum_q(64'd0), .write(write), .add(add),
      .write_row(write_row), .d(d));
  function automatic legal(input [127:0] one);
    logic [15:0] first_last, second_last;
    first_last = one[31:16] + one[79:64] - 16'd1;
    second_last = one[47:32] + one[79:64] - 16'd1;
    legal = one[3:0] != npu_words::OP_MATMUL || (one[79:64] != 16'd0 && one[79:64] <= 16'd8
        && one[31:16] < 16'd32 && one[47:32] < 16'd32
        && first_last[15:3] == {one[31:19]} && second_last[15:3] == {one[47:35]}
        && one[31:19] != one[47:35]);
  endfunction
  always @* assume (!valid || legal(head));
  always_ff @(posedge clk) if (started) begin
    if (state != 2'd0) a_legal : assert (legal(word));
    a_ports : assert (!(first_read && second_read && first_row[4:3] == second_row[4:3]));
  end
endmodule

// AXI4 as load and store show it: what is shown stays until it is taken.
module npu_prove_store (
    input logic clk,
    input logic valid,
    input logic [127:0] head,
    input logic awready,
    input logic wready,
    input logic bvalid
);
  logic started;
  initial started = 1'b0;
  always_ff @(posedge clk) started <= 1'b1;
  wire rst = !started;
  logic begins, runs, done;
  logic [127:0] word;
  wire [4:0] none;
  wire [1:0] state;
  npu_issue #(.NUMBER(2)) issue (
      .clk(clk), .rst(rst), .valid(valid), .head(head), .pop(none[4]), .prev_ready(1'b1),
      .next_ready(1'b1), .prev_take(none[0]), .next_take(none[1]), .prev_room(1'b1),
      .next_room(1'b1), .prev_put(none[2]), .next_put(none[3]), .begins(begins), .runs(runs),
      .done(done), .state(state), .word(word));
  npu_store #(.COLUMNS(2), .LANES(1), .DMA(2), .ROW(2)) store (
      .clk(clk), .rst(rst), .begins(begins), .runs(runs), .head(head), .word(word), .done(done),
      .seed(1'b0), .seed_value(32'd0), .read(), .read_row(), .q(64'd0), .awvalid(),
      .awready(awready), .awaddr(), .awlen(), .wvalid(), .wready(wready), .wdata(), .wstrb(),
      .wlast(), .bvalid(bvalid), .bready());
endmodule

// A memory that sends no beat that was not asked for.
module npu_prove_load (
    input logic clk,
    input logic valid,
    input logic [127:0] head,
    input logic arready,
    input logic rvalid
);
  logic started;
  initial started = 1'b0;
  always_ff @(posedge clk) started <= 1'b1;
  wire rst = !started;
  logic begins, runs, done, arvalid, rready;
  logic [7:0] arlen;
  logic [127:0] word;
  wire [4:0] none;
  wire [1:0] state;
  npu_issue #(.NUMBER(0)) issue (
      .clk(clk), .rst(rst), .valid(valid), .head(head), .pop(none[4]), .prev_ready(1'b1),
      .next_ready(1'b1), .prev_take(none[0]), .next_take(none[1]), .prev_room(1'b1),
      .next_room(1'b1), .prev_put(none[2]), .next_put(none[3]), .begins(begins), .runs(runs),
      .done(done), .state(state), .word(word));
  npu_load #(.SLOTS(4), .DMA(2), .ROW(3)) load (
      .clk(clk), .rst(rst), .begins(begins), .runs(runs), .head(head), .word(word), .done(done),
      .arvalid(arvalid), .arready(arready), .araddr(), .arlen(arlen), .rvalid(rvalid),
      .rready(rready), .rdata(16'd0), .write(), .write_row(), .d());
  logic [15:0] owed;
  always_ff @(posedge clk)
    owed <= rst ? 16'd0 : owed + (arvalid && arready ? {8'd0, arlen} + 16'd1 : 16'd0)
        - {15'd0, rvalid && rready};
  always @* assume (!rvalid || owed != 16'd0);
  always @* assume (head[63:48] != 16'd0 && head[63:48] <= 16'd3 && head[47:32] == 16'd1
      && head[13:12] == 2'd0 && !head[96] && !head[64]);
  always_ff @(posedge clk) if (started) begin
    a_quiet : assert (!(begins && arvalid));
    if (state == 2'd0) a_all_came : assert (owed == 16'd0);
  end
endmodule
