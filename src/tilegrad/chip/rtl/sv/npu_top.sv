// The chip: front end, queues, tokens, three units, memories; AXI4 to DRAM, AXI4-Lite to the host.

module npu_top #(
    parameter int ROWS = 4,
    parameter int COLUMNS = 4,
    parameter int SUMS_STAY = 0,
    parameter int ELEMENT = 8,
    parameter int WEIGHT = 8,
    parameter int FLOATING = 0,  // bits of the exponent: 8 of bf16, 5 of fp16
    parameter int SPARSE = 0,
    parameter int STOCHASTIC = 0,
    parameter int BANKS = 4,
    parameter int BANK_ROWS = 32,
    parameter int SUM_ROWS = 32,
    parameter int LANES = 2,
    parameter int QUEUE = 2,
    parameter int TOKENS = 3,
    parameter int WORDS = 128,
    parameter int DMA = 4
) (
    input  logic             clk,
    input  logic             rst,
    // AXI4-Lite control
    input  logic             s_awvalid,
    output logic             s_awready,
    input  logic [3:0]       s_awaddr,
    input  logic             s_wvalid,
    output logic             s_wready,
    input  logic [31:0]      s_wdata,
    output logic             s_bvalid,
    input  logic             s_bready,
    output logic [1:0]       s_bresp,
    input  logic             s_arvalid,
    output logic             s_arready,
    input  logic [3:0]       s_araddr,
    output logic             s_rvalid,
    input  logic             s_rready,
    output logic [31:0]      s_rdata,
    output logic [1:0]       s_rresp,
    // AXI4 to DRAM
    output logic             m_arvalid,
    input  logic             m_arready,
    output logic [31:0]      m_araddr,
    output logic [7:0]       m_arlen,
    output logic [2:0]       m_arsize,
    output logic [1:0]       m_arburst,
    input  logic             m_rvalid,
    output logic             m_rready,
    input  logic [DMA*8-1:0] m_rdata,
    input  logic [1:0]       m_rresp,
    input  logic             m_rlast,
    output logic             m_awvalid,
    input  logic             m_awready,
    output logic [31:0]      m_awaddr,
    output logic [7:0]       m_awlen,
    output logic [2:0]       m_awsize,
    output logic [1:0]       m_awburst,
    output logic             m_wvalid,
    input  logic             m_wready,
    output logic [DMA*8-1:0] m_wdata,
    output logic [DMA-1:0]   m_wstrb,
    output logic             m_wlast,
    input  logic             m_bvalid,
    output logic             m_bready,
    input  logic [1:0]       m_bresp,
    output logic             fault  // DRAM answered with an error
);
  localparam int SIDE = ROWS > COLUMNS ? ROWS : COLUMNS;
  localparam int SLOTS = SPARSE != 0 || WEIGHT != ELEMENT ? 2 * SIDE : SIDE;
  localparam int SLOT = ELEMENT + (SPARSE != 0 ? 2 : 0);
  localparam int SCRATCH_ROW = $clog2(BANKS * BANK_ROWS);
  localparam int SUM_ROW = $clog2(SUM_ROWS);
  localparam int PROGRAM_ROW = $clog2(WORDS);
  localparam int COUNT = $clog2(QUEUE + 1);
  localparam int TOKEN = $clog2(TOKENS + 1);
  localparam int BEAT = $clog2(DMA);
  localparam logic [2:0] SIZE = BEAT[2:0];

  logic start, seed, program_write, finished, running;
  logic [31:0] seed_value, program_data;
  logic [PROGRAM_ROW-1:0] program_row;
  logic [1:0] program_part, front_state;
  logic [15:0] pc;
  wire [2:0] full, valid, push, pop;
  logic [127:0] sent;
  wire [3*128-1:0] head;
  wire [3*COUNT-1:0] waiting;
  wire [4*TOKEN-1:0] tokens;
  wire [3:0] put, take, room, ready;  // load to execute, back, execute to store, back
  wire [2:0] begins, runs, done;
  wire [3*2-1:0] states;
  wire [3*128-1:0] words;
  wire [11:0] none;  // ends of the chain: no unit before load, none after store

  assign s_bresp = 2'd0;
  assign s_rresp = 2'd0;
  assign m_arsize = SIZE;
  assign m_awsize = SIZE;
  assign m_arburst = 2'd1;
  assign m_awburst = 2'd1;
  assign running = front_state != 2'd0;
  assign finished = front_state == 2'd3 && valid == 3'd0 && states == 6'd0;
  always_ff @(posedge clk) begin
    if (rst || start) fault <= 1'b0;
    else if ((m_rvalid && m_rready && m_rresp != 2'd0) || (m_bvalid && m_bresp != 2'd0))
      fault <= 1'b1;
  end

  npu_control #(.BITS(PROGRAM_ROW)) control (
      .clk(clk), .rst(rst), .awvalid(s_awvalid), .awready(s_awready), .awaddr(s_awaddr),
      .wvalid(s_wvalid), .wready(s_wready), .wdata(s_wdata), .bvalid(s_bvalid), .bready(s_bready),
      .arvalid(s_arvalid), .arready(s_arready), .araddr(s_araddr), .rvalid(s_rvalid),
      .rready(s_rready), .rdata(s_rdata), .start(start), .write(program_write),
      .write_row(program_row), .write_part(program_part), .write_data(program_data),
      .running(running), .finished(finished));
  npu_front #(.WORDS(WORDS)) front (
      .clk(clk), .rst(rst), .start(start), .write(program_write), .write_row(program_row),
      .write_part(program_part), .write_data(program_data), .full(full), .push(push), .sent(sent),
      .seed(seed), .seed_value(seed_value), .state(front_state), .pc(pc));

  genvar n;
  generate
    for (n = 0; n < 3; n = n + 1) begin : g_queue
      npu_queue #(.DEPTH(QUEUE)) queue (
          .clk(clk), .rst(rst), .push(push[n]), .d(sent), .full(full[n]), .pop(pop[n]),
          .head(head[n*128+:128]), .valid(valid[n]), .count(waiting[n*COUNT+:COUNT]));
    end
    for (n = 0; n < 4; n = n + 1) begin : g_token
      npu_token #(.MOST(TOKENS)) token (
          .clk(clk), .rst(rst || start), .put(put[n]), .room(room[n]), .take(take[n]),
          .ready(ready[n]), .count(tokens[n*TOKEN+:TOKEN]));
    end
  endgenerate
  npu_issue #(.NUMBER(0)) issue_load (
      .clk(clk), .rst(rst), .valid(valid[0]), .head(head[0+:128]), .pop(pop[0]),
      .prev_ready(1'b0), .next_ready(ready[1]), .prev_take(none[0]), .next_take(take[1]),
      .prev_room(1'b0), .next_room(room[0]), .prev_put(none[1]), .next_put(put[0]),
      .begins(begins[0]), .runs(runs[0]), .done(done[0]), .state(states[0+:2]),
      .word(words[0+:128]));
  npu_issue #(.NUMBER(1)) issue_execute (
      .clk(clk), .rst(rst), .valid(valid[1]), .head(head[128+:128]), .pop(pop[1]),
      .prev_ready(ready[0]), .next_ready(ready[3]), .prev_take(take[0]), .next_take(take[3]),
      .prev_room(room[1]), .next_room(room[2]), .prev_put(put[1]), .next_put(put[2]),
      .begins(begins[1]), .runs(runs[1]), .done(done[1]), .state(states[2+:2]),
      .word(words[128+:128]));
  npu_issue #(.NUMBER(2)) issue_store (
      .clk(clk), .rst(rst), .valid(valid[2]), .head(head[256+:128]), .pop(pop[2]),
      .prev_ready(ready[2]), .next_ready(1'b0), .prev_take(take[2]), .next_take(none[2]),
      .prev_room(room[3]), .next_room(1'b0), .prev_put(put[3]), .next_put(none[3]),
      .begins(begins[2]), .runs(runs[2]), .done(done[2]), .state(states[4+:2]),
      .word(words[256+:128]));
  assign none[11:4] = 8'd0;

  logic scratch_write, first_read, second_read, sum_read, store_read, sum_write, sum_add;
  logic [SCRATCH_ROW-1:0] scratch_row, first_row, second_row;
  logic [SUM_ROW-1:0] sum_row, store_row, sum_write_row;
  wire [SLOTS*SLOT-1:0] scratch_d, first_q, second_q;
  wire [COLUMNS*32-1:0] sum_q, store_q, sum_d;
  npu_load #(
      .SLOTS(SLOTS), .ELEMENT(ELEMENT), .WEIGHT(WEIGHT), .FLOATING(FLOATING), .SPARSE(SPARSE),
      .DMA(DMA), .ROW(SCRATCH_ROW)
  ) load (
      .clk(clk), .rst(rst), .begins(begins[0]), .runs(runs[0]), .head(head[0+:128]),
      .word(words[0+:128]), .done(done[0]), .arvalid(m_arvalid), .arready(m_arready),
      .araddr(m_araddr), .arlen(m_arlen), .rvalid(m_rvalid), .rready(m_rready), .rdata(m_rdata),
      .write(scratch_write), .write_row(scratch_row), .d(scratch_d));
  npu_scratchpad #(.BANKS(BANKS), .BANK_ROWS(BANK_ROWS), .WIDTH(SLOTS * SLOT)) scratchpad (
      .clk(clk), .first(first_read), .first_row(first_row), .first_q(first_q),
      .second(second_read), .second_row(second_row), .second_q(second_q),
      .write(scratch_write), .write_row(scratch_row), .d(scratch_d));
  npu_execute #(
      .ROWS(ROWS), .COLUMNS(COLUMNS), .SLOTS(SLOTS), .ELEMENT(ELEMENT), .WEIGHT(WEIGHT),
      .FLOATING(FLOATING), .SPARSE(SPARSE), .SUMS_STAY(SUMS_STAY), .LANES(LANES),
      .SCRATCH_ROW(SCRATCH_ROW), .SUM_ROW(SUM_ROW)
  ) execute (
      .clk(clk), .rst(rst), .begins(begins[1]), .runs(runs[1]), .word(words[128+:128]),
      .done(done[1]), .first_read(first_read), .first_row(first_row), .first_q(first_q),
      .second_read(second_read), .second_row(second_row), .second_q(second_q),
      .sum_read(sum_read), .sum_row(sum_row), .sum_q(sum_q), .write(sum_write), .add(sum_add),
      .write_row(sum_write_row), .d(sum_d));
  npu_accumulator #(.ROWS(SUM_ROWS), .COLUMNS(COLUMNS), .FLOATING(FLOATING)) accumulator (
      .clk(clk), .read(sum_read), .read_row(sum_row), .q(sum_q), .store(store_read),
      .store_row(store_row), .store_q(store_q), .write(sum_write), .add(sum_add),
      .write_row(sum_write_row), .d(sum_d));
  npu_store #(
      .COLUMNS(COLUMNS), .ELEMENT(ELEMENT), .FLOATING(FLOATING), .STOCHASTIC(STOCHASTIC),
      .LANES(LANES), .DMA(DMA), .ROW(SUM_ROW)
  ) store (
      .clk(clk), .rst(rst), .begins(begins[2]), .runs(runs[2]), .head(head[256+:128]),
      .word(words[256+:128]), .done(done[2]), .seed(seed), .seed_value(seed_value),
      .read(store_read), .read_row(store_row), .q(store_q), .awvalid(m_awvalid),
      .awready(m_awready), .awaddr(m_awaddr), .awlen(m_awlen), .wvalid(m_wvalid),
      .wready(m_wready), .wdata(m_wdata), .wstrb(m_wstrb), .wlast(m_wlast), .bvalid(m_bvalid),
      .bready(m_bready));
  wire unused = &{1'b0, none, pc, waiting, tokens, m_rlast};
endmodule
